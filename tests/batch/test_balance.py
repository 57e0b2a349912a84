"""Rows over data-parallel ranks: every row once, and the slowest rank close to a lower bound of every split."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batch.lengths import LLAMA_7B, distributions
from ppoctl.engines.megatron.balance import _exchange, balance, sequence_costs
from ppoctl.models.cost import TokenCost
from tolerance import EXACT, FLOAT32

RANKS = 64


def lists(shares: list[Tensor]) -> list[list[int]]:
    return [share.tolist() for share in shares]


def loads(costs: Tensor, shares: list[Tensor]) -> Tensor:
    return torch.stack([costs[share].sum() for share in shares])


def heaviest(costs: Tensor, shares: list[Tensor]) -> float:
    return float(loads(costs, shares).max())


def float_costs(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def whole_costs(generator: torch.Generator, num_rows: int) -> Tensor:
    """Whole numbers, so that their sums are exact in any order; small, so that some are equal."""
    return torch.randint(0, 40, (num_rows,), generator=generator).double()


def lower_bound(costs: Tensor, ranks: int) -> float:
    """Return a lower bound on the slowest rank of any split: the mean load; the costliest row; and, because k *
    ranks + 1 rows put k + 1 of them on some rank, the sum of the k + 1 cheapest of the k * ranks + 1 costliest
    rows, for each k."""
    costliest = costs.sort(descending=True).values
    crowded = [float(costliest[k * ranks - k : k * ranks + 1].sum()) for k in range(1, (len(costs) - 1) // ranks + 1)]
    return max(float(costs.sum()) / ranks, float(costliest[0]), *crowded)


def test_costliest_rows_go_to_least_loaded_rank():
    """9 to the first, 7 to the second, 5 to the third; 4 joins 5, 2 joins 7, and 9 to 9 to 9 is even."""
    assert lists(balance(float_costs(2, 9, 4, 7, 5), 3)) == [[1], [0, 3], [2, 4]]


def test_balance_swaps_rows_that_greedy_placed_badly():
    """3 3 2 2 2 on two ranks: costliest first ends at 3+2+2 and 3+2. The loads differ by 2, so rows that differ by 1
    are swapped: 3 of the first for 2 of the second, and both have 6."""
    costs = float_costs(3, 3, 2, 2, 2)
    assert loads(costs, balance(costs, 2)).tolist() == [6, 6]
    assert sorted(lists(balance(costs, 2))) == [[0, 1], [2, 3, 4]]


def test_exchange_minimizes_load_difference_of_two_ranks():
    """10 + 15 against 1 + 5 + 9: 25 and 15, so costs that differ by 5 make them even: 10 for 5. The nearest cheaper
    row (15 for 9) would leave 19 and 21. Then no exchange helps: they are even."""
    heavy, light = [(10.0, 0), (15.0, 1)], [(1.0, 2), (5.0, 3), (9.0, 4)]
    assert _exchange(heavy, light, 10.0)
    assert (heavy, light) == ([(5.0, 3), (15.0, 1)], [(1.0, 2), (9.0, 4), (10.0, 0)])
    assert not _exchange(heavy, light, 0.0)


def test_row_can_move_in_exchange_for_none():
    """6 + 30 against 8 + 14: the loads differ by 14, and the 6 alone is nearest to half of that."""
    heavy, light = [(6.0, 0), (30.0, 1)], [(8.0, 2), (14.0, 3)]
    assert _exchange(heavy, light, 14.0)
    assert (heavy, light) == ([(30.0, 1)], [(6.0, 0), (8.0, 2), (14.0, 3)])


def test_fewer_rows_than_ranks_leaves_ranks_empty():
    assert lists(balance(float_costs(1, 2), 4)) == [[1], [0], [], []]
    assert lists(balance(float_costs(), 2)) == [[], []]


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_balance_rejects_invalid_cost_and_names_row(cost: float):
    with pytest.raises(ValueError, match=rf"row 1 costs `{cost}`"):
        balance(float_costs(1, cost), 2)


def test_balance_rejects_zero_ranks():
    with pytest.raises(ValueError, match="`ranks = 0`"):
        balance(float_costs(1), 0)


def test_balance_is_an_ordered_deterministic_partition():
    generator = torch.Generator().manual_seed(0)
    for num_rows, ranks in itertools.product((1, 5, 32, 100), (1, 2, 7, 64)):
        costs = whole_costs(generator, num_rows)
        shares = lists(balance(costs, ranks))
        assert len(shares) == ranks
        assert sorted(row for share in shares for row in share) == list(range(num_rows))
        assert all(share == sorted(share) for share in shares)
        assert lists(balance(costs.clone(), ranks)) == shares


def test_loads_do_not_depend_on_row_order():
    generator = torch.Generator().manual_seed(1)
    for num_rows, ranks in itertools.product((5, 32, 100), (2, 7, 64)):
        costs = whole_costs(generator, num_rows)
        permuted = costs[torch.randperm(num_rows, generator=generator)]
        EXACT.check(loads(permuted, balance(permuted, ranks)), loads(costs, balance(costs, ranks)))


def test_balance_does_not_depend_on_cost_unit():
    generator = torch.Generator().manual_seed(2)
    for num_rows, ranks in itertools.product((5, 32, 100), (2, 7, 64)):
        costs = torch.rand(num_rows, generator=generator, dtype=torch.float64)
        for unit in (2.0**-40, 2.0**40):  # powers of two, which round nothing
            assert lists(balance(costs * unit, ranks)) == lists(balance(costs, ranks))
        whole = whole_costs(generator, num_rows)
        assert lists(balance(whole * 3, ranks)) == lists(balance(whole, ranks))


def test_small_splits_meet_graham_bound_and_are_mostly_optimal():
    """All splits of seven rows over three ranks are tried. Costliest first is within 4/3 - 1/(3 * 3) of the best
    (Graham, 1969), and exchanges only lower it."""
    generator = torch.Generator().manual_seed(3)
    best_found = 0
    for _ in range(30):
        costs = whole_costs(generator, 7)
        best = min(
            max(sum(cost for cost, at in zip(costs.tolist(), places, strict=True) if at == rank) for rank in range(3))
            for places in itertools.product(range(3), repeat=7)
        )
        found = heaviest(costs, balance(costs, 3))
        assert found <= (4 / 3 - 1 / 9) * best
        best_found += found == best
    assert best_found >= 27


@pytest.mark.parametrize("num_seqs", [2048, pytest.param(4096, marks=pytest.mark.ci("2048"))])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.ci("0"))])
def test_slowest_of_64_ranks_is_within_2_percent_of_bound(num_seqs: int, seed: int, ppoctl_data: Path):
    """The bound is the larger of the mean load and the longest sequence, including attention, on real and on
    long-tailed lengths. 1 in 1,000 is met today; the rest of the 2 % is a margin for other lengths."""
    for name, _, tokens in distributions(num_seqs, seed, ppoctl_data):
        costs = sequence_costs(tokens, LLAMA_7B)
        bound = max(float(costs.sum()) / RANKS, float(costs.max()))
        ratio = heaviest(costs, balance(costs, RANKS)) / bound
        assert ratio <= 1.02, name
        assert ratio <= 1.001, name


@pytest.mark.parametrize(
    "num_seqs", [256, *(pytest.param(number, marks=pytest.mark.ci("256")) for number in (512, 1024))]
)
def test_few_rows_per_rank_stay_close_to_lower_bound(num_seqs: int, ppoctl_data: Path):
    """Four rows per rank and more. With few rows the mean can be unreachable: 65 equal rows on 64 ranks put two on
    one rank. The bound includes that."""
    assert lower_bound(torch.ones(65), RANKS) == heaviest(torch.ones(65), balance(torch.ones(65), RANKS)) == 2
    for name, _, tokens in distributions(num_seqs, 0, ppoctl_data):
        costs = sequence_costs(tokens, LLAMA_7B)
        assert heaviest(costs, balance(costs, RANKS)) <= 1.02 * lower_bound(costs, RANKS), name


def test_sequence_cost_matches_hand_computed_flops():
    """Five weights, two layers of three heads of four numbers: 10 per token, 4 * 24 = 96 per pair. With 3 tokens the
    first attends to one, the second to two, the third to three: 30 + 6 * 96 = 606. One token: 10 + 96."""
    cost = TokenCost.of_decoder(parameters=5, num_layers=2, num_heads=3, head_dim=4)
    assert cost == TokenCost(flops_per_token=10.0, flops_per_pair=96.0)
    EXACT.check(sequence_costs(torch.tensor([3, 1, 0]), cost), float_costs(606, 106, 0))


def test_sequence_cost_equals_flops_of_matrix_products():
    """Counted from the shapes: each of 7 tokens passes a layer of weights [h, 5h]; then queries and weights over the
    positions up to its own, in each layer."""
    hidden, layers, length = 8, 3, 7
    weights = layers * hidden * 5 * hidden
    counted = sum(2 * weights + layers * (2 * seen * hidden + 2 * seen * hidden) for seen in range(1, length + 1))
    cost = TokenCost.of_decoder(weights, num_layers=layers, num_heads=2, head_dim=hidden // 2)
    FLOAT32.check(sequence_costs(torch.tensor([length]), cost), float_costs(counted))


def test_sequence_cost_includes_quadratic_attention():
    """One row of 64k tokens and 64 of 1k: as many tokens as the rest together, and costlier by attention."""
    tokens = torch.tensor([65536] + [1024] * 64)
    costs = sequence_costs(tokens, LLAMA_7B)
    assert lists(balance(tokens.double(), 2))[0] == [0] == lists(balance(costs, 2))[0]
    assert float(costs[0]) > 2 * float(costs[1:].sum())
