"""Rounding error of merged weights: what engines compute with differs from what the trainer computes with.

    error = |merged - (W + scale x B A)| / |scale x B A|        norms over all weights with adapters

A merged weight has the dtype of the model. An error near 1 means that rounding removes what the adapters add.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.engines.megatron.low_rank import adapters_in
from ppoctl.engines.megatron.megatron_model import PackedModel
from ppoctl.engines.megatron.parameter_shards import sent_parts
from ppoctl.models.convert.adapters import merged

NUMBERS_AT_ONCE = 2**22
"""Largest number of elements whose float64 products are in memory at the same time."""


@torch.no_grad()
def merge_error(stages: Sequence[PackedModel]) -> float:
    """Return the error over the weights of all ranks; 0 if all products are 0. Collective over all ranks.

    Each element is counted once: by the first data and context rank and, for a weight that tensor ranks do not split,
    by the first tensor rank.
    """
    groups, adapters = stages[0].pg_collection, adapters_in(stages)
    sums = torch.zeros(2, dtype=torch.float64, device=stages[0].settings.device)
    for stage in stages if groups.dp_cp.rank() == 0 else ():
        for part in sent_parts(stage):
            if part.name in adapters and (part.split is not None or groups.tp.rank() == 0):
                own, scale = adapters[part.name]
                sums += squares(part.view.reshape(-1, own.a.shape[1]), own.a, own.b, scale)
    torch.distributed.all_reduce(sums, group=torch.distributed.group.WORLD)
    lost, product = sums.tolist()
    return math.sqrt(lost / product) if product > 0 else 0.0


def squares(
    weight: Float[Tensor, "outputs inputs"],
    a: Float[Tensor, "rank inputs"],
    b: Float[Tensor, "outputs rank"],
    scale: float,
    at_once: int = NUMBERS_AT_ONCE,
) -> Float[Tensor, "2"]:
    """Return the sums over a weight of (merged - exact)^2 and of (scale x B A)^2; the exact weight is float64.
    Float64 products of at most `at_once` elements, or of one row, are in memory at the same time."""
    pieces = list(_squares_of_rows(weight, a, b, scale, at_once))
    return torch.stack(pieces).sum(0)


def _squares_of_rows(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, at_once: int
) -> Iterator[Float[Tensor, "2"]]:
    rows = max(1, at_once // weight.shape[1])
    for some, part in zip(weight.split(rows), b.split(rows), strict=True):
        product = scale * (part.double() @ a.double())
        lost = merged(some, a, part, scale).double() - some.double() - product
        yield torch.stack([lost.square().sum(), product.square().sum()])
