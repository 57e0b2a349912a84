"""Advantages relative to the group: by hand, and independent of padding, order and other groups."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from ppo.grids import holey_mask, normal
from ppoctl.ppo.groups import Formula, from_mean, from_mean_of_others, group_advantages, standardized
from tolerance import EXACT, FLOAT32

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
SCORES = torch.tensor([1.0, 0.0, 2.0, 3.0, 0.0, 1.0])
VALID = torch.tensor([True, True, True, True, False, True])
MASK = torch.tensor(
    [
        [True, True, True, False],
        [True, False, False, False],
        [True, False, True, True],  # a hole at the second token
        [True, True, False, False],
        [False, False, False, False],  # no score: no token is in a loss
        [True, True, True, True],
    ]
)
FORMULAS: tuple[Formula, ...] = (standardized, from_mean, from_mean_of_others)


def spread(rows: list[float]) -> Tensor:
    return torch.tensor(rows)[:, None] * MASK


def test_group_advantages_by_hand() -> None:
    # Group 0: mean (1 + 0 + 2) / 3 = 1, deviations 0, -1, 1, std sqrt((0 + 1 + 1) / 2) = 1.
    # Group 1, without its second response: mean (3 + 1) / 2 = 2, deviations 1, -1, std sqrt((1 + 1) / 1) = sqrt(2).
    found, equal = group_advantages(SCORES, VALID, GROUPS, MASK, standardized)
    first, second = 1 / (1 + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    FLOAT32.check(found, spread([0.0, -first, first, second, 0.0, -second]))
    assert found.dtype == torch.float32
    assert equal == 0.0


def test_unscaled_advantages_by_hand() -> None:
    found, _ = group_advantages(SCORES, VALID, GROUPS, MASK, from_mean)
    EXACT.check(found, spread([0.0, -1.0, 1.0, 1.0, 0.0, -1.0]))


def test_leave_one_out_advantages_by_hand() -> None:
    # Group 0: 1 - (0 + 2) / 2 = 0, 0 - (1 + 2) / 2 = -1.5, 2 - (1 + 0) / 2 = 1.5.
    # Group 1, without its second response: 3 - 1 = 2, 1 - 3 = -2.
    found, _ = group_advantages(SCORES, VALID, GROUPS, MASK, from_mean_of_others)
    EXACT.check(found, spread([0.0, -1.5, 1.5, 2.0, 0.0, -2.0]))


def test_advantages_are_zero_where_masked_out() -> None:
    # A truncated response that is filtered has a score, but no unmasked token: it is in the mean of its group.
    mask = MASK & (torch.arange(6) != 2)[:, None]
    found, _ = group_advantages(SCORES, VALID, GROUPS, mask, from_mean)
    EXACT.check(found, spread([0.0, -1.0, 1.0, 1.0, 0.0, -1.0]) * mask)
    assert not found[~mask].any()


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("score", [0.1, 0.7, 1 / 3, -1e-20, 123456.789, 3e38, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_equal_scores_have_advantage_exactly_zero(formula: Formula, score: float, size: int) -> None:
    scores, valid, mask = torch.full((size,), score), torch.ones(size, dtype=torch.bool), torch.ones(size, 2).bool()
    found, equal = group_advantages(scores, valid, torch.zeros(size, dtype=torch.int64), mask, formula)
    EXACT.check(found, torch.zeros(size, 2))
    assert equal == 1.0


@pytest.mark.parametrize("num_valid", [0, 1])
def test_group_with_fewer_than_two_scores_has_advantage_zero(num_valid: int) -> None:
    # Group 1 keeps its advantages; half of the groups are equal.
    valid = VALID & ((torch.arange(6) > 2) | (torch.arange(6) < num_valid))
    found, equal = group_advantages(SCORES, valid, GROUPS, MASK, from_mean)
    EXACT.check(found, spread([0.0, 0.0, 0.0, 1.0, 0.0, -1.0]))
    assert equal == 0.5


def test_scores_with_large_offset_keep_their_differences() -> None:
    # The float32 numbers around 2^24 are 2 apart: deviations -1, 1, -1, 1, std sqrt(4 / 3).
    scores = 2.0**24 + torch.tensor([0.0, 2.0, 0.0, 2.0])
    valid, mask = torch.ones(4, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool)
    found, _ = group_advantages(scores, valid, torch.zeros(4, dtype=torch.int64), mask, standardized)
    size = 1 / (math.sqrt(4 / 3) + 1e-6)
    FLOAT32.check(found[:, 0], torch.tensor([-size, size, -size, size]))


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("seed", range(5))
def test_order_of_rows_does_not_change_a_bit(formula: Formula, seed: int) -> None:
    scores, valid, groups, mask = random_batch(seed)
    expected, fraction = group_advantages(scores, valid, groups, mask, formula)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    found, same = group_advantages(scores[order], valid[order], groups[order], mask[order], formula)
    assert torch.equal(found, expected[order])
    assert same == fraction


@pytest.mark.parametrize("order", [*permutations(range(4))])
def test_mean_is_rounded_once_in_any_order(order: tuple[int, ...]) -> None:
    # The mean is (2^60 + 1 - 2^60 + 3) / 4 = 1; a running sum in float64 would lose the small scores.
    scores, valid, mask = torch.tensor([2.0**60, 1.0, -(2.0**60), 3.0]), torch.ones(4) > 0, torch.ones(4, 1) > 0
    rows = list(order)
    found, _ = group_advantages(scores[rows], valid, torch.zeros(4, dtype=torch.int64), mask, from_mean)
    EXACT.check(found[:, 0], torch.tensor([2.0**60, 0.0, -(2.0**60), 2.0])[rows])


@pytest.mark.parametrize("formula", FORMULAS)
def test_padding_and_other_groups_do_not_change_a_bit(formula: Formula) -> None:
    scores, valid, groups, mask = random_batch(0)
    expected, _ = group_advantages(scores, valid, groups, mask, formula)
    padded = torch.cat([mask, torch.zeros(len(mask), 5, dtype=torch.bool)], dim=1)
    found, _ = group_advantages(scores, valid, groups, padded, formula)
    assert torch.equal(found[:, : mask.shape[1]], expected)
    assert not found[:, mask.shape[1] :].any()
    own = groups == 3
    alone, _ = group_advantages(scores[own], valid[own], groups[own], mask[own], formula)
    assert torch.equal(alone, expected[own])


def random_batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores, valid rows, groups and mask of 8 prompts x 9 samples; one response in ten has no score."""
    valid = torch.rand(72, generator=torch.Generator().manual_seed(seed)) < 0.9
    scores = torch.where(valid, 5 + 3 * normal(72, seed=seed), 0)
    mask = holey_mask(72, 6, seed=seed) & valid[:, None]
    return scores, valid, torch.arange(8).repeat_interleave(9), mask
