"""Distribution of a minibatch's rows over data-parallel ranks. Ranks wait for the slowest rank at every optimizer
step.

The distribution affects speed, never a gradient: every row is on exactly one rank, and divisors of the loss are
counted over the whole minibatch.
"""

import heapq
import math
from bisect import bisect_left, insort

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ppoctl.models.cost import TokenCost

RankRows = list[tuple[float, int]]
"""(cost, row) pairs of one rank, in ascending order."""

CLOSE_ENOUGH = 1e-4
"""Fraction by which the load of the heaviest rank may exceed the lower bound of any distribution. A smaller
improvement cannot be measured."""
TRIES_PER_RANK = 8
"""Number of pairs of ranks to try for an exchange, per rank. The limit bounds the time if few exchanges help."""


def sequence_costs(tokens: Int[Tensor, " M"], cost: TokenCost) -> Float[Tensor, " M"]:
    """Return the FLOPs of each sequence, in float64. `tokens` has the number of packed tokens of each sequence (see
    `Sequences.input_lengths`). Packed sequences do not attend to each other."""
    return torch.tensor([cost.of_sequence(count) for count in tokens.tolist()], dtype=torch.float64)


def balance(costs: Float[Tensor, " M"], ranks: int) -> list[Int[Tensor, " m"]]:
    """Return the rows 0..M-1, distributed over `ranks` so that the largest sum of costs is small. Rows are ascending
    within a rank.

    Costs are in any unit, finite and not negative. The most expensive rows are placed first, each on the rank with
    the smallest load (longest processing time first: at most 4/3 - 1 / (3 ranks) times the optimum, Graham 1969).
    Then single rows move, or are exchanged, from the heaviest rank to lighter ranks. Karmarkar-Karp differencing
    gives loads that are at most 1 in 10,000 better and often worse, and takes sixty times as long.

    The result is a pure function of the input, and loads depend only on costs, not on the order of rows. If there are
    fewer rows than ranks, some ranks get none. Raises ValueError for invalid costs or no ranks.
    """
    work: list[float] = costs.tolist()
    if ranks < 1:
        raise ValueError(f"`ranks = {ranks}`: must be at least 1")
    for row, cost in enumerate(work):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"row {row} costs `{cost}`: must be finite and not negative")
    rows_by_rank = _longest_first(work, ranks)
    _even_out(rows_by_rank, max(math.fsum(work) / ranks, max(work, default=0.0)) * (1 + CLOSE_ENOUGH))
    return [torch.tensor(sorted(row for _, row in rank_rows), dtype=torch.int64) for rank_rows in rows_by_rank]


def _longest_first(work: list[float], ranks: int) -> list[RankRows]:
    rows_by_rank: list[RankRows] = [[] for _ in range(ranks)]
    lightest = [(0.0, rank) for rank in range(ranks)]
    for row in sorted(range(len(work)), key=lambda row: (-work[row], row)):
        load, rank = lightest[0]
        rows_by_rank[rank].append((work[row], row))
        heapq.heapreplace(lightest, (load + work[row], rank))
    for rank_rows in rows_by_rank:
        rank_rows.sort()
    return rows_by_rank


def _even_out(rows_by_rank: list[RankRows], enough: float) -> None:
    """Exchange rows of the heaviest rank with the lightest rank that helps, in place, until the largest load is at
    most `enough`.

    The function stops if no exchange helps. After an exchange, both ranks are lighter than the heavier rank was
    before, so the largest load never grows.
    """
    loads = [_load(rank_rows) for rank_rows in rows_by_rank]
    tries = TRIES_PER_RANK * len(rows_by_rank)
    while True:
        heavy = max(range(len(rows_by_rank)), key=loads.__getitem__)
        if loads[heavy] <= enough:
            return
        for light in sorted(range(len(rows_by_rank)), key=loads.__getitem__):
            if tries == 0:
                return
            tries -= 1
            if _exchange(rows_by_rank[heavy], rows_by_rank[light], loads[heavy] - loads[light]):
                loads[heavy], loads[light] = _load(rows_by_rank[heavy]), _load(rows_by_rank[light])
                break
        else:
            return


def _exchange(heavy: RankRows, light: RankRows, gap: float) -> bool:
    """Move one row from `heavy` to `light`, in exchange for a cheaper row or for none, so that the two loads become
    most equal.

    The costs of the two exchanged rows differ by nearly half the gap. Return False if no exchange makes the heavier
    of the two ranks lighter.
    """
    prices = [0.0, *(cost for cost, _ in light)]  # index 0: no row in exchange
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


def _load(rank_rows: RankRows) -> float:
    return math.fsum(cost for cost, _ in rank_rows)
