"""Which data-parallel rank computes which rows of a minibatch. Ranks wait for the slowest at every optimizer step.

Splitting changes speed, never a gradient: every row is on one rank, and counts are global to the minibatch.
"""

import heapq
import math
from bisect import bisect_left, insort

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ppoctl.model.cost import TokenCost

RankRows = list[tuple[float, int]]
"""The (cost, row) pairs of one rank, ascending."""

CLOSE_ENOUGH = 1e-4
"""How far above what no split can beat the heaviest rank may stay, as a share: less than one can measure."""
TRIES_PER_RANK = 8
"""Pairs of ranks that are tried for an exchange, per rank: the limit of the time when exchanges hardly pay."""


def sequence_costs(tokens: Int[Tensor, " M"], cost: TokenCost) -> Float[Tensor, " M"]:
    """FLOPs of each sequence, float64: t tokens are t * (t + 1) / 2 pairs, because a token sees itself and those
    before it, and packed sequences do not see each other. `tokens` are packed tokens: see `grid.input_lengths`."""
    count = tokens.double()
    return count * cost.flops_per_token + count * (count + 1) / 2 * cost.flops_per_pair


def balance(costs: Float[Tensor, " M"], ranks: int) -> list[Int[Tensor, " m"]]:
    """The rows 0..M-1 split over `ranks` so that the largest sum of costs is small; ascending inside a rank.

    Costs are in any unit, finite and not negative. Dearest rows first, each to the rank with least so far (longest
    processing time, at most 4/3 - 1 / (3 ranks) of the optimum: Graham, 1969); then single rows move, or change
    places, from the heaviest rank to lighter ones. Karmarkar-Karp differencing ends no more than 1 in 10,000 better,
    often worse, and takes sixty times as long. A pure function of its input, and loads depend on costs only, not on
    the order of rows. With fewer rows than ranks some ranks get none. Raises ValueError for other costs or no ranks.
    """
    work: list[float] = costs.tolist()
    if ranks < 1:
        raise ValueError(f"`ranks = {ranks}`: there must be one")
    for row, cost in enumerate(work):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"row {row} costs `{cost}`: must be finite and not negative")
    shares = _dearest_first(work, ranks)
    _even_out(shares, max(math.fsum(work) / ranks, max(work, default=0.0)) * (1 + CLOSE_ENOUGH))
    return [torch.tensor(sorted(row for _, row in share), dtype=torch.int64) for share in shares]


def _dearest_first(work: list[float], ranks: int) -> list[RankRows]:
    shares: list[RankRows] = [[] for _ in range(ranks)]
    lightest = [(0.0, rank) for rank in range(ranks)]
    for row in sorted(range(len(work)), key=lambda row: (-work[row], row)):
        load, rank = lightest[0]
        shares[rank].append((work[row], row))
        heapq.heapreplace(lightest, (load + work[row], rank))
    for share in shares:
        share.sort()
    return shares


def _even_out(shares: list[RankRows], enough: float) -> None:
    """Exchanges rows of the heaviest rank with the lightest that helps, in place, until its load is `enough` or no
    exchange helps. An exchange leaves both lighter than the heavier was, so the largest load never grows."""
    loads = [_load(share) for share in shares]
    tries = TRIES_PER_RANK * len(shares)
    while True:
        heavy = max(range(len(shares)), key=loads.__getitem__)
        if loads[heavy] <= enough:
            return
        for light in sorted(range(len(shares)), key=loads.__getitem__):
            if tries == 0:
                return
            tries -= 1
            if _exchange(shares[heavy], shares[light], loads[heavy] - loads[light]):
                loads[heavy], loads[light] = _load(shares[heavy]), _load(shares[light])
                break
        else:
            return


def _exchange(heavy: RankRows, light: RankRows, gap: float) -> bool:
    """Gives `light` the row of `heavy` that, for a cheaper row of `light` or for nothing, brings their loads closest:
    the costs differ by nearly half the gap. False when no exchange makes the heavier of the two lighter."""
    prices = [0.0, *(cost for cost, _ in light)]  # the first: for nothing
    best: tuple[float, int, int] | None = None
    for given, (cost, _) in enumerate(heavy):
        at = bisect_left(prices, cost - gap / 2)
        for taken in range(max(at - 1, 0), min(at + 1, len(prices))):
            step = cost - prices[taken]
            if 0 < step < gap and (best is None or abs(step - gap / 2) < best[0]):
                best = abs(step - gap / 2), given, taken
    if best is None:
        return False
    _, given, taken = best
    moved = heavy.pop(given)
    if taken:
        insort(heavy, light.pop(taken - 1))
    insort(light, moved)
    return True


def _load(share: RankRows) -> float:
    return math.fsum(cost for cost, _ in share)
