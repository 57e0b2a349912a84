"""All Hugging Face tensors of a model and their placements in Megatron, expanded from the family tables.

All code that moves weights iterates over this list: loading, exports, transfers to the generator, conversion.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ppoctl.models.convert.family_mappings import layer_rows
from ppoctl.models.convert.tensor_mapping import FusedPart, TensorMapping
from ppoctl.models.head import Head
from ppoctl.models.model import Model
from ppoctl.models.shape import LatentShape, ModelShape
from ppoctl.models.trainable import EMBEDDING_PARAMETER, OUTPUT_PARAMETER

EMBEDDING, LM_HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_LAYER = OUTPUT_PARAMETER
"""Megatron's name of the output layer, which computes an actor's logits or a critic's values. On the last pipeline
rank of a tied actor it is a copy of the embedding."""
ROUTER_BIAS = "router.expert_bias"
"""End of the names of tensors that Megatron-Core holds as buffers: no optimizer trains them."""
ROPE_CONSTANTS = "rotary_emb.inv_freq"
"""Suffix of the names of constant tensors that some checkpoints contain."""


@dataclass(frozen=True)
class Placement:
    """The Megatron parameter, and the part of it, that one Hugging Face tensor occupies."""

    name: str
    """Hugging Face name of the tensor."""
    parameter: str
    """Megatron's name of the parameter, with layers and experts numbered as in the whole model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor in Hugging Face."""
    split: int | None
    """Dimension that tensor ranks split evenly; None: each rank has the whole tensor."""
    place: FusedPart
    layer: int | None = None
    """Layer of the tensor; None: before the first layer or after the last."""
    expert: int | None = None
    """Expert of the tensor; None: the tensor does not belong to an expert."""

    def numbered(self, layer: int, expert: int | None) -> str:
        """Return the parameter's name with other numbers for layer and expert, such as the local numbers of a
        pipeline stage or an expert rank."""
        name = self.parameter.replace(f"layers.{self.layer}.", f"layers.{layer}.", 1)
        return name.replace(f"experts.{self.expert}.", f"experts.{expert}.", 1)


def placements(shape: ModelShape, head: Head) -> Iterator[Placement]:
    """Yield the placements of all tensors of the model, in layer order."""
    yield _placement(TensorMapping(EMBEDDING, EMBEDDING_PARAMETER, "vocab* hidden"), shape)
    for layer in range(shape.num_layers):
        for row, expert in _expanded(layer_rows(shape, layer), shape):
            row = row._replace(
                name=f"model.layers.{layer}.{row.name}", parameter=f"decoder.layers.{layer}.{row.parameter}"
            )
            yield _placement(row, shape, layer, expert)
    yield _placement(TensorMapping(FINAL_NORM, "decoder.final_layernorm.weight", "hidden"), shape)
    if head == "value":
        # A critic is transformers' ...ForSequenceClassification with one label; a reward model may have more labels.
        yield _placement(TensorMapping(VALUE_HEAD, OUTPUT_LAYER, "labels hidden"), shape)
    elif not shape.tied_embeddings:
        yield _placement(TensorMapping(LM_HEAD, OUTPUT_LAYER, "vocab* hidden"), shape)


def tied_copy(shape: ModelShape) -> Placement:
    """Return the placement of the copy of a tied actor's embedding on the last of several pipeline ranks."""
    return _placement(TensorMapping(EMBEDDING, OUTPUT_LAYER, "vocab* hidden"), shape)


def parameter_names(shape: ModelShape, head: Head) -> list[str]:
    """Return Megatron's names of all parameters of the model, in layer order, without a value head on the policy's
    model and without untrained tensors (a router's bias)."""
    names = (each.parameter for each in placements(shape, head) if not each.parameter.endswith(ROUTER_BIAS))
    return list(dict.fromkeys(names))


def frozen_names(model: Model) -> list[str]:
    """Return the Hugging Face names of all tensors of a model that never change, in layer order. A state without
    frozen parameters contains all tensors but these. The biases of routers are among them."""
    return [
        each.name
        for each in placements(model.shape, model.head)
        if each.parameter.endswith(ROUTER_BIAS) or not model.trains(each.parameter)
    ]


def weight_names(shape: ModelShape) -> Iterator[str]:
    """Yield the Hugging Face names of an actor's weights, in layer order."""
    return (placement.name for placement in placements(shape, "token"))


def tensor_sizes(shape: ModelShape, layer: int) -> Iterator[int]:
    """Yield the number of elements of each tensor of this layer, in the order of `placements`."""
    known = sizes(shape)
    for of_experts, rows in groupby(layer_rows(shape, layer), key=_is_of_experts):
        numbers = [math.prod(known[dim.rstrip("*")] for dim in row.dims.split()) for row in rows]
        yield from numbers * (shape.experts.count if of_experts and shape.experts is not None else 1)


def expert_tensor_sizes(shape: ModelShape, layer: int) -> Iterator[int]:
    """Yield the number of elements of each matrix of the experts of this layer."""
    known = sizes(shape)
    for row in filter(_is_of_experts, layer_rows(shape, layer)):
        each = math.prod(known[dim.rstrip("*")] for dim in row.dims.split())
        yield from [each] * (0 if shape.experts is None else shape.experts.count)


def _is_of_experts(row: TensorMapping) -> bool:
    return "{expert}" in row.name


def sizes(shape: ModelShape) -> dict[str, int]:
    """Return the sizes of the dimensions that rows of the family tables name."""
    known = {
        "one": 1,
        "labels": shape.labels,
        "vocab": shape.vocab_size,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_hidden_size,
        "head": shape.head_dim,
        "queries": shape.query_channels,
        "keys": shape.key_channels,
    }
    if shape.experts is not None:
        known |= {"experts": shape.experts.count, "expert_ffn": shape.experts.ffn_hidden_size}
        known |= {"shared_ffn": shape.experts.shared_width}
    return known if shape.latent is None else known | _latent_sizes(shape.latent, shape.num_heads)


def _latent_sizes(latent: LatentShape, heads: int) -> dict[str, int]:
    return {
        "query_rank": latent.query_rank or 0,
        "kv_rank": latent.kv_rank,
        "kv_rank+rope": latent.kv_rank + latent.rope_dim,
        "values": heads * latent.value_dim,
        "keys+values": heads * (latent.nope_dim + latent.value_dim),
    }


def _expanded(rows: Iterable[TensorMapping], shape: ModelShape) -> Iterator[tuple[TensorMapping, int | None]]:
    """Yield the rows of a layer, with the rows of experts repeated for each expert: all rows of one expert come
    before the rows of the next."""
    for of_experts, group in groupby(rows, key=_is_of_experts):
        if not of_experts:
            yield from ((row, None) for row in group)
            continue
        assert shape.experts is not None
        expert_rows = list(group)
        for expert in range(shape.experts.count):
            names = [(row.name.format(expert=expert), row.parameter.format(expert=expert)) for row in expert_rows]
            yield from (
                (TensorMapping(*pair, row.dims, row.place), expert)
                for row, pair in zip(expert_rows, names, strict=True)
            )


def _placement(
    row: TensorMapping, shape: ModelShape, layer: int | None = None, expert: int | None = None
) -> Placement:
    known, dims = sizes(shape), row.dims.split()
    whole = tuple(known[dim.rstrip("*")] for dim in dims)
    split = next((number for number, dim in enumerate(dims) if dim.endswith("*")), None)
    return Placement(row.name, row.parameter, whole, split, row.place, layer, expert)
