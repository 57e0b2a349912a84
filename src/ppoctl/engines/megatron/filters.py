"""Truncated sampling as in the generator (vLLM). One threshold per position decides which ids a distribution keeps.

An id is kept if its logit reaches the threshold. With a split vocabulary the ranks compute the threshold together
from a few numbers per position. Logits are never gathered. All ranks must therefore process the same positions
together.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.core.ports import OutputRequest

RankGroup = torch.distributed.ProcessGroup | None
"""The ranks that hold the other ids. None: this rank holds all ids."""

LEFT_OUT = -1e9
"""Logit of an id that is not kept. The probability of the id is 0, and 0 times its log-prob is 0. With a logit of
-inf the product would be NaN."""

_HALVINGS = 25
"""Number of halvings. They reduce an interval of about thirty nats below float32's resolution."""


def thresholds(
    x: Float[Tensor, "n v"], asked: OutputRequest, *, num_ids: int, group: RankGroup
) -> Float[Tensor, " n"]:
    """Return the smallest logit that each position keeps, from the scaled logits of this rank's ids. The rank may
    have no ids.

    The filters are applied in vLLM's order. min-p keeps ids that are at least `min_p` times as likely as the most
    likely id. Top-k keeps the `top_k` most likely of these ids. Top-p keeps the smallest set of most likely ids whose
    fraction of the remaining probability is at least `top_p`. Ids as likely as the last id of a set are kept too.
    """
    peak = _reduced(_largest(x), torch.distributed.ReduceOp.MAX, group)
    smallest = torch.full_like(peak, -torch.inf)
    if asked.min_p > 0:
        smallest = peak + math.log(asked.min_p)
    if asked.top_k is not None and asked.top_k < num_ids:
        smallest = torch.maximum(smallest, _kth_largest(x, asked.top_k, group))
    if asked.top_p < 1:
        mass = (x - peak[:, None]).exp_().masked_fill_(x < smallest[:, None], 0.0)
        smallest = torch.maximum(smallest, peak + _edge(mass, asked.top_p, num_ids, group))
    return smallest


def lowered_to(smallest: Float[Tensor, " n"], drawn: Float[Tensor, " n"], group: RankGroup) -> Float[Tensor, " n"]:
    """Return thresholds that also keep the sampled id. Its logit may be below the threshold because of rounding, or
    because the model was trained after sampling. `drawn` is the logit of the sampled id, or minus infinity if another
    rank has the id."""
    # `_reduced` works in place, so it gets a copy.
    return torch.minimum(smallest, _reduced(drawn.clone(), torch.distributed.ReduceOp.MAX, group))


def _kth_largest(x: Float[Tensor, "n v"], k: int, group: RankGroup) -> Float[Tensor, " n"]:
    """Return the k-th largest logit of each position. It is minus infinity if there are fewer than k logits."""
    largest = x.topk(min(k, x.shape[1]), -1).values
    # `all_gather` requires equal shapes, and the last ranks of the vocabulary may have fewer than k ids.
    largest = torch.nn.functional.pad(largest, (0, k - largest.shape[1]), value=-torch.inf)
    if group is not None:
        gathered = [torch.empty_like(largest) for _ in range(group.size())]
        torch.distributed.all_gather(gathered, largest, group=group)
        largest = torch.cat(gathered, -1).topk(k, -1).values
    return largest[:, -1]


def _edge(mass: Float[Tensor, "n v"], top_p: float, num_ids: int, group: RankGroup) -> Float[Tensor, " n"]:
    """Return the log of the mass above which ids have the fraction `top_p` of the total, by bisection instead of
    sorting. Each iteration makes one pass over the mass and reduces one number per position. The most likely id has a
    mass of 1, so the ids below the initial interval together have less mass than may be left out."""
    total = _reduced(mass.sum(-1), torch.distributed.ReduceOp.SUM, group)
    low = torch.full_like(total, math.log((1 - top_p) / num_ids) - 1)
    high = torch.zeros_like(total)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = mass.where(mass > middle.exp()[:, None], 0.0).sum(-1)
        enough = _reduced(above, torch.distributed.ReduceOp.SUM, group) >= top_p * total
        low, high = middle.where(enough, low), high.where(enough, middle)
    return low


def _largest(x: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
    return x.amax(-1) if x.shape[1] else x.new_full((len(x),), torch.finfo(x.dtype).min)


def _reduced(
    values: Float[Tensor, " n"],
    how: torch.distributed.ReduceOp.RedOpType,
    group: RankGroup,
) -> Float[Tensor, " n"]:
    if group is not None:
        torch.distributed.all_reduce(values, how, group=group)
    return values
