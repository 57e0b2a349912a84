"""Each step of reward shaping, by hand."""

import math
from itertools import pairwise

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.formulas.generalized_advantages import gae, length_adaptive_lambda, monte_carlo
from ppoctl.algorithms.formulas.rewards import (
    Moments,
    bootstrapped,
    length_penalty,
    merged,
    moments_of,
    overlong_penalty,
    scaled,
)
from tolerance import FLOAT32


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((0.0, 1.0), (-1.0, 1.0), [-1.0, -1.0, -0.5, 1.0, 1.0]),
        ((-3.0, 5.0), (0.0, 1.0), [0.0, 0.375, 0.40625, 0.5, 1.0]),
        ((0.0, 1.0), (1.0, 0.0), [1.0, 1.0, 0.75, 0.0, 0.0]),
    ],
)
def test_scores_are_clamped_and_rescaled(
    source: tuple[float, float], target: tuple[float, float], expected: list[float]
) -> None:
    # -3..5 mapped to 0..1: (0 + 3) / 8 = 0.375, (0.25 + 3) / 8 = 0.40625, (1 + 3) / 8 = 0.5; -4 and 9 are outside.
    scores = torch.tensor([-4.0, 0.0, 0.25, 1.0, 9.0])
    assert torch.equal(scaled(scores, source=source, target=target), torch.tensor(expected))


def test_scaled_bounds_equal_target_exactly() -> None:
    found = scaled(torch.tensor([0.1, 0.7]), source=(0.1, 0.7), target=(-0.3, 0.9))
    assert torch.equal(found, torch.tensor([-0.3, 0.9]))
    assert found.dtype == torch.float32


def test_merged_moments_by_hand() -> None:
    # 1, 3: mean 2, m2 = 1 + 1. 2, 4, 9: mean 5, m2 = 9 + 1 + 16 = 26. Together: mean 19/5 = 3.8,
    # m2 = 2 + 26 + 3^2 * 2 * 3 / 5 = 38.8; by hand 7.84 + 0.64 + 3.24 + 0.04 + 27.04 = 38.8.
    one, other = moments_of(torch.tensor([1.0, 3.0])), moments_of(torch.tensor([2.0, 4.0, 9.0]))
    assert (one, other) == (Moments(2.0, 2.0, 2.0), Moments(3.0, 5.0, 26.0))
    both = merged(one, other)
    assert (both.count, both.mean, both.m2) == (5.0, pytest.approx(3.8), pytest.approx(38.8))
    assert both.std == pytest.approx(math.sqrt(38.8 / 4))
    assert one.std == pytest.approx(math.sqrt(2))


def test_moments_of_fewer_than_two_values_have_zero_std() -> None:
    nothing, single = moments_of(torch.tensor([])), moments_of(torch.tensor([7.0]))
    assert merged(nothing, nothing) == nothing
    assert merged(nothing, single) == single == merged(single, nothing)
    assert (nothing.std, single.std) == (0.0, 0.0)


@given(
    numbers=st.lists(st.floats(-1e6, 1e6, width=32), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_moments_are_independent_of_step_boundaries(numbers: list[float], cuts: list[int]) -> None:
    found, edges = Moments(0.0, 0.0, 0.0), [0, *sorted(cuts), len(numbers)]
    for start, end in pairwise(edges):
        found = merged(found, moments_of(torch.tensor(numbers[start:end])))
    whole = moments_of(torch.tensor(numbers))
    size = max((abs(number) for number in numbers), default=0.0) + 1e-30
    assert found.count == whole.count
    assert found.mean == pytest.approx(whole.mean, abs=1e-9 * size)
    assert found.std == pytest.approx(whole.std, rel=1e-9, abs=1e-6 * size)


@pytest.mark.parametrize(("floor", "last"), [(True, -1.0), (False, -2.0)])
def test_overlong_penalty_by_hand(floor: bool, last: float) -> None:
    # DAPO's numbers at 14336 with a buffer of 2048: nothing up to 12288, half at 13312, all at 14336; without a floor
    # 2048 tokens more cost the full penalty again (NeMo-RL).
    lengths = torch.tensor([1, 12288, 12289, 13312, 14336, 16384])
    found = overlong_penalty(lengths, max_tokens=14336, buffer_tokens=2048, penalty=1.0, floor=floor)
    FLOAT32.check(found, torch.tensor([0.0, 0.0, -1 / 2048, -0.5, -1.0, last]))
    twice = overlong_penalty(lengths, max_tokens=14336, buffer_tokens=2048, penalty=2.0, floor=floor)
    FLOAT32.check(twice, 2 * found)


def test_length_penalty_counts_tokens_beyond_free_ones() -> None:
    found = length_penalty(torch.tensor([1, 4, 5, 9]), per_token=0.25, free_tokens=4)
    assert found.tolist() == [0.0, 0.0, -0.25, -1.25]


def test_length_adaptive_lambda_by_hand() -> None:
    # alpha 0.5 and 1, 2, 3, 8 tokens without holes: max(1, 0.5), max(1, 1), 1.5, 4.
    mask = torch.zeros(5, 9, dtype=torch.bool)
    for row, n in enumerate((0, 1, 2, 3)):
        mask[row, : 2 * n : 2] = True
    mask[4, 1:] = True
    found = length_adaptive_lambda(mask, alpha=0.5)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 1 / 3, 3 / 4])
    # NeMo-RL's: 100 and 1000 tokens at 0.05 give 0.8 and 0.98.
    rows = [length_adaptive_lambda(torch.ones(1, n, dtype=torch.bool), alpha=0.05) for n in (20, 100, 1000)]
    assert [float(row) for row in rows] == pytest.approx([0.0, 0.8, 0.98])


def test_monte_carlo_returns_by_hand() -> None:
    # gamma 1/2, a hole in the second row: 4, 2 + 4/2, 1 + 4/2; 2, 1 + 2/2.
    rewards = torch.tensor([[1.0, 2.0, 4.0], [1.0, 99.0, 2.0]])
    mask = torch.tensor([[True, True, True], [True, False, True]])
    FLOAT32.check(monte_carlo(rewards, mask, gamma=0.5), torch.tensor([[3.0, 4.0, 4.0], [2.0, 0.0, 2.0]]))


@given(
    seed=st.integers(0, 2**31), columns=st.integers(1, 40), gamma=st.floats(0, 1), garbage=st.sampled_from(GARBAGE)
)
def test_monte_carlo_equals_loop_and_ignores_masked_garbage(
    seed: int, columns: int, gamma: float, garbage: float
) -> None:
    mask = holey_mask(4, columns, seed=seed)
    mask[1] = False
    rewards = normal(4, columns, seed=seed + 1)
    expected_returns = torch.zeros(4, columns, dtype=torch.float64)
    for row in range(4):
        future = 0.0
        for column in reversed(mask[row].nonzero().flatten().tolist()):
            future = float(rewards[row, column]) + gamma * future
            expected_returns[row, column] = future
    FLOAT32.check(monte_carlo(poisoned(rewards, mask, garbage), mask, gamma=gamma), expected_returns.float())


def test_truncated_return_includes_bootstrap_value_by_paper() -> None:
    """Pardo et al. 2018 (arXiv:1712.00378), eq. 6: the last return of a truncated episode is r_T + gamma V(s_T+1)."""
    # gamma 0.5, lambda 1, V_T+1 = 6: returns 4 + 0.5 x 6 = 7, 1 + 0.5 x 7 = 4.5. The second row has ended: 4 and 3.
    rewards = torch.tensor([[1.0, 4.0, -77.0], [1.0, -77.0, 4.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    rewards_with = bootstrapped(torch.where(mask, rewards, 0), torch.tensor([6.0, 0.0]), mask, gamma=0.5)
    _, returns = gae(rewards_with, torch.ones(2, 3), mask, gamma=0.5, lam=1.0)
    FLOAT32.check(returns, torch.tensor([[4.5, 7.0, 0.0], [3.0, 0.0, 4.0]]))


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_bootstrapped_returns_equal_returns_of_longer_row(lam: float) -> None:
    """The recursion over a row with one more token, whose return is the bootstrap value (no reward, and no value
    after it), gives equal results for the tokens before."""
    gamma, columns = 0.9, 5
    rewards, values = normal(3, columns, seed=1), normal(3, columns, seed=2)
    mask = holey_mask(3, columns, seed=3)
    bootstrap = torch.tensor([2.0, 0.0, -1.0])
    longer = [torch.cat([x, last[:, None]], 1) for x, last in ((rewards, bootstrap), (values, bootstrap))]
    counted = torch.cat([mask, torch.ones(3, 1, dtype=torch.bool)], 1)
    extended = gae(*longer, counted, gamma=gamma, lam=lam)
    found = gae(bootstrapped(rewards, bootstrap, mask, gamma=gamma), values, mask, gamma=gamma, lam=lam)
    for got, expected in zip(found, extended, strict=True):
        FLOAT32.check(got, expected[:, :columns] * mask)


def test_fully_masked_row_has_no_bootstrapped_return() -> None:
    mask = torch.tensor([[False, False], [True, False]])
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    found = bootstrapped(rewards, torch.tensor([math.nan, 4.0]), mask, gamma=0.5)
    assert found.tolist() == [[0.0, 0.0], [3.0, 0.0]]
