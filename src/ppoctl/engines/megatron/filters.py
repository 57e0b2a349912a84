"""Truncated sampling as the generator does it: which ids a distribution keeps, as one threshold per position.

An id is kept where its logit reaches the threshold. On a split vocabulary the ranks find it together from a few
numbers per position, and logits are never gathered; all ranks therefore go through the same positions together.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.ports import OutputRequest

RankGroup = torch.distributed.ProcessGroup | None
"""The ranks that have the other ids; None: there are none."""

LEFT_OUT = -1e9
"""Logit of an id that is not kept: its probability is 0, and 0 times its log-prob is 0 and not NaN."""

_HALVINGS = 25
"""They bring an interval of some thirty nats below float32's resolution."""


def thresholds(
    x: Float[Tensor, "n v"], asked: OutputRequest, *, num_ids: int, group: RankGroup
) -> Float[Tensor, " n"]:
    """Smallest logit that each position keeps, from divided logits of this rank's ids (there may be none).

    In vLLM's order: min-p, the ids at least `min_p` times as likely as the likeliest; of those the `top_k` likeliest;
    of those the smallest set of likeliest ids that has the share `top_p` of what is left. Ids as likely as the last
    of a set are kept with it.
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
    """Thresholds that keep the id that was drawn too: rounding, or training since, may have put it below. `drawn` is
    its logit, minus infinity where another rank has it."""
    return torch.minimum(smallest, _reduced(drawn.clone(), torch.distributed.ReduceOp.MAX, group))


def _kth_largest(x: Float[Tensor, "n v"], k: int, group: RankGroup) -> Float[Tensor, " n"]:
    """Minus infinity where there are fewer than k."""
    found = x.topk(min(k, x.shape[1]), -1).values
    found = torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-torch.inf)
    if group is not None:
        everyone = [torch.empty_like(found) for _ in range(group.size())]
        torch.distributed.all_gather(everyone, found, group=group)
        found = torch.cat(everyone, -1).topk(k, -1).values
    return found[:, -1]


def _edge(mass: Float[Tensor, "n v"], top_p: float, num_ids: int, group: RankGroup) -> Float[Tensor, " n"]:
    """Log of the mass above which ids have the share `top_p` of all, by halving an interval: a pass and one number
    per position each time, and no sorting. The likeliest id has a mass of 1, so that ids below the interval together
    have less than may be left out."""
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
    found: Float[Tensor, " n"],
    how: torch.distributed.ReduceOp.RedOpType,
    group: RankGroup,
) -> Float[Tensor, " n"]:
    if group is not None:
        torch.distributed.all_reduce(found, how, group=group)
    return found
