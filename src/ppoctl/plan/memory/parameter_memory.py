"""Parameters of a rank: all, or those that train. Both are counted by Megatron's names, from the family tables.

Matrices of adapters are parameters of the layer that has the adapted projection. Tensor ranks split one of the two
matrices, and each tensor rank has the other one whole (`convert.adapters`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.convert.adapters import adapters
from ppoctl.models.convert.family_mappings import layer_rows
from ppoctl.models.convert.tensors import ROUTER_BIAS, sizes
from ppoctl.models.head import VALUE_HEAD_PREFIX
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable import EMBEDDING_PARAMETER, EVERYTHING, OUTPUT_PARAMETER, Trainable
from ppoctl.plan.memory.pipeline import PipelineStage

FINAL_NORM = "decoder.final_layernorm.weight"
VALUE_HEAD_NORM = f"{VALUE_HEAD_PREFIX}final_layernorm.weight"
"""The final norm, and its copy in a value head with copied layers."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of one rank."""

    shared: int
    """Parameters that every data rank has."""
    experts: int
    """Parameters that only ranks with the same experts have."""

    @property
    def total(self) -> int:
        return self.shared + self.experts


@dataclass(frozen=True)
class LayerParameters:
    """Number of parameters of one layer, by the ranks that can split them."""

    split: int = 0
    """Parameters that tensor ranks split: matrices of attention, and of the MLP or the shared experts."""
    experts: int = 0
    """Parameters that expert ranks split."""
    whole: int = 0
    """Parameters that every tensor rank has: norms, projections to latents, router and gate of experts."""
    of_token: float = 0
    """Parameters of the matrices that one token is multiplied with: of the experts, those that it is routed to."""


@lru_cache(maxsize=1024)
def rank_parameters(model: Model, stage: PipelineStage, layout: ParallelTable) -> Parameters:
    """Return the parameters of one tensor rank in a pipeline stage that train.

    The rank has a slice of each matrix, some experts or slices of experts, and complete copies of norms, routers and
    projections to latents. A value head has one row of weights instead of the output layer. The last stage of a
    model with tied embeddings has a copy of the embedding, unless it is also the first stage. Trained experts are
    assumed to be spread evenly over the ranks.
    """

    def counted(name: str, numbers: int) -> int:
        return numbers if model.trains(name) else 0

    shape = model.shape
    table = shape.padded_vocab_size * shape.hidden_size // layout.tensor
    layers = [layer_parameters(model, layer) for layer in stage.layers]
    total = counted(EMBEDDING_PARAMETER, table) if stage.is_first else 0
    if stage.is_last:
        total += counted(FINAL_NORM, shape.hidden_size)
        if model.head == "value":
            total += counted(OUTPUT_PARAMETER, shape.hidden_size)
        elif not (shape.tied_embeddings and stage.is_first):
            total += counted(OUTPUT_PARAMETER, table)
        total += sum(counted(*each) for each in value_head_parameters(model))
        layers += [
            layer_parameters(model, layer, f"{VALUE_HEAD_PREFIX}layers.{number}.")
            for number, layer in enumerate(model.copied_layers)
        ]
    return Parameters(total + _on_rank(layers, layout), sum(layer.experts for layer in layers) // layout.expert_ranks)


@lru_cache(maxsize=1024)
def held_parameters(model: Model, stage: PipelineStage, layout: ParallelTable) -> Parameters:
    """Return all parameters of one tensor rank in a pipeline stage, frozen or not, with adapters."""
    weights = rank_parameters(replace(model, trainable=EVERYTHING), stage, layout)
    of_adapters = _on_rank([adapter_parameters(model, layer) for layer in stage.layers], layout)
    return Parameters(weights.shared + of_adapters, weights.experts)


def _on_rank(layers: Sequence[LayerParameters], layout: ParallelTable) -> int:
    """Return the parameters of these layers on one tensor rank, without experts."""
    return sum(layer.split // layout.tensor + layer.whole for layer in layers)


@lru_cache(maxsize=1024)
def layer_parameters(model: Model, layer: int, prefix: str | None = None) -> LayerParameters:
    """Return the parameters of a layer that train. `prefix` begins their names if the layer is a copy, which has no
    adapters."""
    if prefix is None and model.trainable.lora is not None:
        return adapter_parameters(model, layer)  # nothing else in a layer trains
    shape = model.shape
    begins = f"decoder.layers.{layer}." if prefix is None else prefix
    known, split, experts, whole, of_token = sizes(shape), 0, 0, 0, 0.0
    for row in layer_rows(shape, layer):
        if row.parameter.endswith(ROUTER_BIAS):
            continue
        tensors = _trained_tensors(begins + row.parameter, model)
        numbers = tensors * math.prod(known[dim.rstrip("*")] for dim in row.dims.split())
        frac = 1.0
        if "{expert}" in row.parameter and shape.experts is not None:
            experts, frac = experts + numbers, shape.experts.per_token / shape.experts.count
        elif "*" in row.dims:
            split += numbers
        else:
            whole += numbers
        if " " in row.dims.strip():
            of_token += frac * numbers
    return LayerParameters(split, experts, whole, of_token)


def _trained_tensors(name: str, model: Model) -> int:
    """Return the number of tensors with this name that train: one or, if the name is that of each expert, several."""
    experts = model.shape.experts
    if "{expert}" not in name or experts is None:
        return int(model.trains(name))
    if not model.trainable.freeze:  # without patterns, the experts of a layer do not differ
        return experts.count * model.trains(name)
    names = (name.replace("{expert}", str(expert)) for expert in range(experts.count))
    return sum(map(model.trains, names))


def adapter_parameters(model: Model, layer: int) -> LayerParameters:
    """Return the parameters of the adapters in a layer."""
    return _adapters_by_layer(model.shape, model.trainable).get(layer, LayerParameters())


def largest_adapted(model: Model, layout: ParallelTable) -> int:
    """Return the number of elements that one tensor rank has of the largest weight with an adapter."""
    bases = {(adapter.base.shape, adapter.base.split) for adapter in adapters(model.shape, model.trainable)}
    sizes = (math.prod(size) // (1 if split is None else layout.tensor) for size, split in bases)
    return max(sizes, default=0)


@lru_cache(maxsize=64)
def _adapters_by_layer(shape: ModelShape, trainable: Trainable) -> Mapping[int, LayerParameters]:
    numbers = defaultdict[int, list[int]](lambda: [0, 0])
    for adapter in adapters(shape, trainable):
        for matrix in (adapter.a, adapter.b):
            assert matrix.layer is not None, "only projections of layers have adapters"
            numbers[matrix.layer][matrix.split is None] += math.prod(matrix.shape)
    return {
        layer: LayerParameters(split=split, whole=whole, of_token=split + whole)
        for layer, (split, whole) in numbers.items()
    }


def value_head_parameters(model: Model) -> Iterator[tuple[str, int]]:
    """Yield name and size of each parameter of a value head on a policy's model, without the copied layers. Each
    tensor rank has all of them."""
    head, hidden = model.value_head, model.shape.hidden_size
    if head is None:
        return
    width = 2 * hidden if head.kind == "mlp" else hidden
    if head.layers_copied:
        yield VALUE_HEAD_NORM, hidden
    if head.kind == "mlp":
        yield f"{VALUE_HEAD_PREFIX}hidden_layer.weight", width * hidden
        yield f"{VALUE_HEAD_PREFIX}hidden_layer.bias", width
        yield f"{VALUE_HEAD_PREFIX}output_layer.bias", 1
    yield f"{VALUE_HEAD_PREFIX}output_layer.weight", width


@lru_cache(maxsize=64)
def trunk_end(model: Model) -> int:
    """Return the number of layers of the frozen trunk, which are the first layers: `Model.first_layer` without a list
    of all names."""
    if model.trains(EMBEDDING_PARAMETER):
        return 0
    layers = range(model.num_layers)
    trained = (layer for layer in layers if layer_parameters(model, layer) != LayerParameters())
    return next(trained, model.num_layers)
