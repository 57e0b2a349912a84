"""Placements of adapter matrices, and the weights of a model with adapters: merged weights.

The tables of the families (`tensor_mapping`) determine the shapes, and the dimension that tensor ranks split: A has
the inputs of the projection, and B the outputs.

    projection split by outputs (q_proj, up_proj):  A whole on each tensor rank, rows of B split
    projection split by inputs (o_proj, down_proj): columns of A split, B whole on each tensor rank
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ppoctl.models.convert.tensor_mapping import FusedPart
from ppoctl.models.convert.tensors import Placement, parameter_names, placements
from ppoctl.models.lora import A, B, adapter_name
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Adapter:
    """The adapter of one projection in one layer."""

    base: Placement
    """The weight of the projection."""
    a: Placement
    b: Placement
    """The two matrices. Their names are those of transformers with `.lora_A.weight` after the projection, as peft
    writes them after the prefix `base_model.model.`."""

    @property
    def projection(self) -> str:
        """Name of the projection, such as `q_proj`."""
        return projection_of(self.base)


def projection_of(placement: Placement) -> str:
    """Return the name of the module that has the tensor, without its parents."""
    return placement.name.split(".")[-2]


def projections(shape: ModelShape) -> Iterator[Placement]:
    """Yield the weights of all projections that can have an adapter: those of attention, of MLPs and of shared
    experts. Routed experts have none: merged, they would be most of the model at each transfer, and peft has no plain
    adapter for the tensors into which transformers fuses them."""
    return (each for each in _all_projections(shape) if each.expert is None)


@cache
def expert_projections(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of the projections that routed experts have. Shared experts and the MLPs of other layers may
    have projections of the same names."""
    return tuple(dict.fromkeys(projection_of(each) for each in _all_projections(shape) if each.expert is not None))


@cache
def _all_projections(shape: ModelShape) -> tuple[Placement, ...]:
    return tuple(
        each
        for each in placements(shape, "token")
        if each.name.endswith(".weight") and "_proj" in projection_of(each)
    )


@cache
def adapters(shape: ModelShape, trainable: Trainable) -> tuple[Adapter, ...]:
    """Return the adapters of a model of this shape, in layer order."""
    lora = trainable.lora
    if lora is None:
        return ()
    return tuple(
        _adapter(each, lora.rank)
        for each in projections(shape)
        if lora.is_target(projection_of(each)) and trainable.adapts(each.parameter)
    )


def _adapter(base: Placement, rank: int) -> Adapter:
    outputs, inputs = base.shape
    module, projection = base.name.removesuffix(".weight"), projection_of(base)

    def matrix(name: str, shape: tuple[int, int], split: int | None) -> Placement:
        parameter = adapter_name(base.parameter, projection, name)
        return Placement(f"{module}.{name}.weight", parameter, shape, split, FusedPart.WHOLE, base.layer)

    return Adapter(
        base,
        matrix(A, (rank, inputs), 1 if base.split == 1 else None),
        matrix(B, (outputs, rank), 0 if base.split == 0 else None),
    )


@cache
def trunk_layers(model: Model) -> int:
    """Return the number of layers of the frozen trunk. 0: the embedding or the first layer trains."""
    matrices = (each for adapter in adapters(model.shape, model.trainable) for each in (adapter.a, adapter.b))
    names = [*parameter_names(model.shape, model.head), *(each.parameter for each in matrices)]
    return model.first_layer(names)


def constant_names(model: Model) -> frozenset[str]:
    """Return the Hugging Face names of a policy's tensors that are sent to engines only once: those of blocks in
    which no parameter trains and no projection has an adapter. A block is a module of a layer (attention,
    feed-forward network, norm; with experts: router, all routed experts, shared expert, its gate) or a tensor outside
    of the layers: vLLM fuses tensors of a block, and loads a fused layer only as a whole."""
    all_placements = list(placements(model.shape, "token"))
    changing = {_block(each, model.shape) for each in all_placements if model.trains(each.parameter)}
    changing |= {_block(adapter.base, model.shape) for adapter in adapters(model.shape, model.trainable)}
    return frozenset(each.name for each in all_placements if _block(each, model.shape) not in changing)


def _block(weight: Placement, shape: ModelShape) -> tuple[str, ...]:
    names = weight.name.split(".")  # model.layers.LAYER.MODULE or, with experts, model.layers.LAYER.mlp.MODULE
    has_modules = weight.layer is not None and shape.has_experts(weight.layer) and names[3] == "mlp"
    return tuple(names[: 5 if has_modules else 4])


def added(a: "Tensor", b: "Tensor", scale: float) -> "Tensor":
    """Return scale x B A, float32.

    The products are added one rank after the other, so a slice of the result has the same bits as the result of
    slices: every layout of ranks and every conversion merges to equal weights.
    """
    a, b = a.float(), b.float()
    total = a.new_zeros(len(b), a.shape[1])
    for row, column in zip(a, b.T, strict=True):
        total.addcmul_(column[:, None], row[None])
    return total.mul_(scale)


def merged(weight: "Tensor", a: "Tensor", b: "Tensor", scale: float) -> "Tensor":
    """Return weight + scale x B A, computed in float32 and rounded once to the dtype of `weight`."""
    return added(a, b, scale).add_(weight).to(weight.dtype)
