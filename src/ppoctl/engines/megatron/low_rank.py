"""Low-rank adapters in the linear layers of a pipeline stage.

    y = W x + scale x B A x        A: [rank, inputs]   B: [outputs, rank]   x: one row per token

A layer that fuses several projections (queries, keys, values; gate, up) has an adapter for each of them, because peft
has one A per projection. Only the low-rank rows A x move between tensor ranks:

    outputs split (q_proj, up_proj)    A whole, B split    A x -> all tokens on each rank, gradient summed
    inputs split (o_proj, down_proj)   A split, B whole    A x -> sum over the ranks, with sequence parallelism
                                                                of each rank's own tokens
    not split (latent projections)     both whole          nothing moves

Sources: Hu et al. 2021 (arXiv:2106.09685); peft; the canonical form of NVIDIA's megatron-bridge.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from ppoctl.core.batch.seeds import derive_seed
from ppoctl.models.convert import adapters as placed
from ppoctl.models.convert.tensor_mapping import FusedPart
from ppoctl.models.convert.tensors import Placement
from ppoctl.models.lora import A, B, adapted_parameter, is_adapter
from ppoctl.models.shape import ModelShape

_QKV = (FusedPart.QUERY, FusedPart.KEY, FusedPart.VALUE)
_MLP = (FusedPart.GATE, FusedPart.UP)


class ProjectionAdapter(torch.nn.Module):
    """The two matrices of one projection, or this tensor rank's slices of them."""

    def __init__(self, adapter: placed.Adapter, base: Tensor, ranks: int, *, sequence: bool) -> None:
        """`base`: the parameter that contains the projection; the matrices have its dtype and device. `sequence`:
        whether tensor ranks split the tokens between layers."""
        super().__init__()
        self.adapter = adapter
        for name, placement in ((A, adapter.a), (B, adapter.b)):
            shape = list(placement.shape)
            if placement.split is not None:
                shape[placement.split] //= ranks
            matrix = torch.nn.Parameter(base.new_empty(shape))
            if placement.split is not None:
                set_tensor_model_parallel_attributes(matrix, is_parallel=True, dim=placement.split, stride=1)
            # With split tokens, a whole matrix sees a part of them, so its gradients are summed over the ranks.
            matrix.sequence_parallel = sequence and placement.split is None  # type: ignore[attr-defined]
            self.register_parameter(name, matrix)

    @property
    def a(self) -> torch.nn.Parameter:
        return self.get_parameter(A)

    @property
    def b(self) -> torch.nn.Parameter:
        return self.get_parameter(B)


class Adapters(torch.nn.Module):
    """The adapters of one linear layer. The names of their modules are those of the projections."""

    def __init__(self, parts: Sequence[placed.Adapter], scale: float, base: Tensor, stage: GPTModel) -> None:
        """`parts`: the adapters of the projections that the parameter `base` of the stage contains."""
        super().__init__()
        self.group: torch.distributed.ProcessGroup = stage.pg_collection.tp
        self.sequence: bool = stage.config.sequence_parallel
        self.scale, self.shape = scale, stage.settings.shape
        self.is_on = True
        self.places = {adapter.projection: adapter.base.place for adapter in parts}
        self.split = parts[0].base.split
        for adapter in parts:
            own = ProjectionAdapter(adapter, base, self.group.size(), sequence=self.sequence)
            self.add_module(adapter.projection, own)

    @property
    def projections(self) -> dict[str, ProjectionAdapter]:
        """The matrices of each projection, by its name."""
        return {name: self.get_submodule(name) for name in self.places}  # type: ignore[misc]

    def forward(self, x: Float[Tensor, "n 1 inputs"]) -> Float[Tensor, "m 1 outputs"]:
        """Return what the adapters add to the output of the layer, given the input of the layer."""
        projections = self.projections.values()
        # The rows are far smaller than the outputs, so the factor is applied to them.
        low = self.scale * self._exchanged(F.linear(x, torch.cat([each.a for each in projections])))
        rows = low.split(len(low[0, 0]) // len(projections), dim=-1)
        outputs = [F.linear(row, each.b) for row, each in zip(rows, projections, strict=True)]
        return _fused(dict(zip(self.places.values(), outputs, strict=True)), self.shape)

    def _exchanged(self, low: Float[Tensor, "n 1 rank"]) -> Float[Tensor, "m 1 rank"]:
        """Move the low-rank rows between tensor ranks as the layer moves its input or output."""
        if self.split is None:
            return low
        moves = {
            (0, False): copy_to_tensor_model_parallel_region,
            (0, True): gather_from_sequence_parallel_region,
            (1, False): reduce_from_tensor_model_parallel_region,
            (1, True): reduce_scatter_to_sequence_parallel_region,
        }
        moved: Tensor = moves[self.split, self.sequence](low, group=self.group)
        return moved

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the matrices as tensors of a saved state."""
        assert metadata is not None
        splits = {
            f"{projection}.{name}": placement.split
            for projection, own in self.projections.items()
            for name, placement in ((A, own.adapter.a), (B, own.adapter.b))
            if placement.split is not None
        }
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            splits,
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state


class Adaptable(torch.nn.Module):
    """A linear layer that may have adapters."""

    adapters: Adapters | None

    def __init__(self, *sizes: Any, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.register_module("adapters", None)

    def with_adapters(self, output: Tensor, x: Tensor) -> Tensor:
        """Return the output of the layer, plus that of its adapters for the same input."""
        if self.adapters is None or not self.adapters.is_on:
            return output
        return output + self.adapters(x)


class AdaptableSplit(Adaptable):
    """A linear layer of Megatron-Core that may have adapters. It precedes the layer's class in the list of bases."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the tensors of a saved state. Megatron-Core's layer would store adapters as if no rank split
        them."""
        own, self.adapters = self.adapters, None
        try:
            state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        finally:
            self.adapters = own
        if own is not None:
            state |= own.sharded_state_dict(f"{prefix}adapters.", sharded_offsets, metadata)
        return state


def attach_adapters(stage: GPTModel) -> None:
    """Give the linear layers of a pipeline stage their adapters, without values. This must precede the wrapper with
    gradient buffers."""
    model, first = stage.settings.model, stage.first_layer
    lora = model.trainable.lora
    if lora is None:
        return
    all_adapters = placed.adapters(model.shape, model.trainable)
    for parameter, group in groupby(all_adapters, key=lambda each: each.base.parameter):
        parts = list(group)
        layer = parts[0].base.layer
        assert layer is not None
        if 0 <= layer - first < len(stage.decoder.layers):
            name = parts[0].base.numbered(layer - first, None)
            linear = stage.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, Adaptable), f"`{parameter}` has no place for adapters"
            linear.adapters = Adapters(parts, lora.scale, linear.get_parameter("weight"), stage)


def adapters_in(stages: Sequence[torch.nn.Module]) -> dict[str, tuple[ProjectionAdapter, float]]:
    """Return Hugging Face name of each adapted weight in these stages -> its matrices, and the factor of their
    product."""
    return {
        own.adapter.base.name: (own, module.scale)
        for stage in stages
        for module in stage.modules()
        if isinstance(module, Adapters)
        for own in module.projections.values()
    }


@contextmanager
def adapters_off(stages: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context in which the stages compute without their adapters: the model that they started from."""
    switched = [module for stage in stages for module in stage.modules() if isinstance(module, Adapters)]
    try:
        for module in switched:
            module.is_on = False
        yield
    finally:
        for module in switched:
            module.is_on = True


def random_a(placement: Placement, *seed: object) -> Float[Tensor, "rank inputs"]:
    """Return the whole initial matrix A: uniform in +-1 / sqrt(inputs), float32. It depends on the seed and the name
    of the matrix, and not on the layout."""
    generator = torch.Generator(device="cpu").manual_seed(derive_seed(*seed, placement.name))
    uniform = torch.rand(placement.shape, generator=generator, device="cpu")
    return (2 * uniform - 1) / placement.shape[1] ** 0.5


def names_of_adapters(parameters: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return name of each adapter matrix in a pipeline stage -> its name in the whole model. `parameters`: the same
    for the weights of the stage. `names`: all names in the stage."""
    found = {}
    for name in filter(is_adapter, names):
        own = adapted_parameter(name)
        found[name] = parameters[own].removesuffix(".weight") + name.removeprefix(own.removesuffix(".weight"))
    return found


def _fused(outputs: Mapping[FusedPart, Tensor], shape: ModelShape) -> Tensor:
    """Return the outputs of several projections in Megatron's order. Parts without an adapter are zero."""
    if FusedPart.WHOLE in outputs:
        return outputs[FusedPart.WHOLE]
    some = next(iter(outputs.values()))
    if not outputs.keys().isdisjoint(_MLP):
        return torch.cat([outputs.get(part, torch.zeros_like(some)) for part in _MLP], dim=-1)
    heads = dict(zip(_QKV, (shape.num_heads // shape.num_kv_heads, 1, 1), strict=True))
    by_group = {part: rows.unflatten(-1, (-1, heads[part], shape.head_dim)) for part, rows in outputs.items()}
    *groups, _, _ = next(iter(by_group.values())).shape
    for part in _QKV:
        by_group.setdefault(part, some.new_zeros((*groups, heads[part], shape.head_dim)))
    return torch.cat([by_group[part] for part in _QKV], dim=-2).flatten(-3)
