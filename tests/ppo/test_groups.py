"""Advantages relative to the group: by hand, and independent of padding, order and other groups."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import Tensor

from ppo.grids import estimator_inputs, holey_mask, normal
from ppoctl.algorithms.formulas import groups
from ppoctl.algorithms.formulas.estimator import EstimatorInputs
from ppoctl.algorithms.formulas.groups import Formula, from_mean, standardized
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
FORMULAS: tuple[Formula, ...] = (
    groups.standardized,
    groups.from_mean,
    groups.from_mean_of_others,
    groups.standardized_by_others,
    groups.from_weighted_mean,
    groups.best_only,
    groups.best_only_scaled,
)
each_formula = pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)


def inputs_of(scores: Tensor, valid: Tensor, indices: Tensor, mask: Tensor) -> EstimatorInputs:
    return estimator_inputs(scores, valid, indices, mask)


def group_advantages(
    scores: Tensor, valid: Tensor, indices: Tensor, mask: Tensor, formula: Formula
) -> tuple[Tensor, float]:
    return groups.group_advantages(inputs_of(scores, valid, indices, mask), formula)


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


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        # Means of the others 1, 1.5, 0.5; 1, 3.
        (groups.from_mean_of_others, [0.0, -1.5, 1.5, 2.0, 0.0, -2.0]),
        # The others of the second response are 1 and 2, with std sqrt(0.5). In the second group there is one other.
        (
            groups.standardized_by_others,
            [0.0, -1.5 / (0.5**0.5 + 1e-6), 1.5 / (0.5**0.5 + 1e-6), 2.0, 0.0, -2.0],
        ),
        # Lengths 3, 1, 3: mean (3 + 0 + 6) / 7 = 9 / 7. Lengths 2, 4: mean (6 + 4) / 6 = 5 / 3.
        (groups.from_weighted_mean, [-2 / 7, -9 / 7, 5 / 7, 4 / 3, 0.0, -2 / 3]),
        # 2 - 1 for the third response, 3 - 1 for the fourth; std 1 and sqrt(2).
        (groups.best_only, [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]),
        (groups.best_only_scaled, [0.0, 0.0, 1 / (1 + 1e-6), 2 / (2**0.5 + 1e-6), 0.0, 0.0]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_formula_by_hand(formula: Formula, expected: list[float]) -> None:
    found, equal = group_advantages(SCORES, VALID, GROUPS, MASK, formula)
    FLOAT32.check(found, spread(expected))
    assert equal == 0.0


def test_scale_of_step_by_hand() -> None:
    # Scores 1, 0, 2, 3, 1: mean 1.4, squares 0.16 + 1.96 + 0.36 + 2.56 + 0.16 = 5.2, std sqrt(5.2 / 4).
    inputs = inputs_of(SCORES, VALID, GROUPS, MASK)
    found, _ = groups.group_advantages(inputs, from_mean, scaled_by_step=True)
    size = 1 / (1.3**0.5 + 1e-6)
    FLOAT32.check(found, spread([0.0, -size, size, size, 0.0, -size]))
    # The step has one score: no group has two, and the std is 0.
    alone = inputs_of(SCORES, torch.arange(6) == 3, GROUPS, MASK)
    found, equal = groups.group_advantages(alone, from_mean, scaled_by_step=True)
    assert (found.abs().max(), equal) == (0.0, 1.0)


def test_decoupled_advantages_by_hand() -> None:
    # Component a: deviations 0, -1, 1, std 1; 1, -1, std sqrt(2). Component b: 0, 4, 2: deviations -2, 2, 0, std 2;
    # the second group is equal. Weights 1 and 0.5.
    components = {"a": SCORES, "b": torch.tensor([0.0, 4.0, 2.0, 5.0, 0.0, 5.0])}
    weights = {"a": 1.0, "b": 0.5}
    inputs = estimator_inputs(SCORES.flip(0), VALID, GROUPS, MASK, components=components, weights=weights)
    found, equal = groups.decoupled_advantages(inputs)
    one, root, two = 1 / (1 + 1e-6), 1 / (2**0.5 + 1e-6), 2 / (2 + 1e-6)
    FLOAT32.check(found, spread([-two / 2, -one + two / 2, one, root, 0.0, -root]))
    assert equal == 0.0


def test_decoupled_advantage_of_a_score_without_components_is_that_of_the_score() -> None:
    # The third and the fifth response have no components. Component a of the first group: 1, 0: deviations 0.5, std
    # sqrt(0.5). Its scores are 2, 1, 0, std 1: the third is -1 / 1, times |2| + |-1|. Second group: component a
    # alone: 3, 1; the scores 3, 1, 1 have mean 5/3 and std sqrt((16 + 4 + 4) / 9 / 2): the fifth is -2/3 / std.
    has = [True, True, False, True, False, True]
    a = [value if has[row] else None for row, value in enumerate(SCORES.tolist())]
    b = [7.0 if has[row] else None for row in range(6)]
    scores = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0, 1.0])
    mask = MASK | (torch.arange(6) == 4)[:, None]
    every = inputs_of(scores, torch.ones(6, dtype=torch.bool), GROUPS, mask)
    inputs = replace(every, extras={"a": a, "b": b}, weights={"a": 2.0, "b": -1.0})
    found, equal = groups.decoupled_advantages(inputs)
    half, root, fifth = 0.5 / (0.5**0.5 + 1e-6), 1 / (2**0.5 + 1e-6), -2 / 3 / ((24 / 18) ** 0.5 + 1e-6)
    expected = [2 * half, -2 * half, -3 / (1 + 1e-6), 2 * root, 3 * fifth, -2 * root]
    FLOAT32.check(found, torch.tensor(expected)[:, None] * mask)
    assert equal == 0.0
    # Without any components, all responses are compared by their scores. The second group is equal.
    found, equal = groups.decoupled_advantages(
        replace(inputs, scores=torch.tensor([2.0, 1.0, 0.0, 3.0, 3.0, 3.0]), extras={})
    )
    EXACT.check(found[3:], torch.zeros(3, 4))
    FLOAT32.check(found[:3, 0], torch.tensor([3.0, 0.0, -3.0]))
    assert equal == 0.5


def test_decoupled_group_is_equal_if_all_components_are() -> None:
    # The first group is equal in a alone, the second group in both.
    components = {
        "a": torch.tensor([1.0, 1.0, 1.0, 0.1, 0.0, 0.1]),
        "b": torch.tensor([0.0, 1.0, 0.0, 7.0, 0.0, 7.0]),
    }
    weights = {"a": 2.0, "b": -1.0}
    inputs = estimator_inputs(SCORES, VALID, GROUPS, MASK, components=components, weights=weights)
    found, equal = groups.decoupled_advantages(inputs)
    assert equal == 0.5
    assert not found[3:].any()
    assert found[1, 0] < 0 < found[0, 0]


@pytest.mark.parametrize(
    ("formula", "lone"),
    [
        # 0.4 - 0.35 is 0.05. The seven others of the lone response are equal, so it is not divided; NeMo-RL divides
        # by their rounded std, and its advantage is 307.7.
        (groups.standardized_by_others, 0.05),
        (groups.from_mean_of_others, 0.05),
        # Deviation 7/8 of 0.05, std sqrt((7/64 + 49/64) / 7) = sqrt(1/8) of 0.05.
        (groups.standardized, 0.04375 / (0.05 * 0.125**0.5 + 1e-6)),
        (groups.best_only, 0.05),
        (groups.best_only_scaled, 0.05 / (0.05 * 0.125**0.5 + 1e-6)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_lone_response_among_equal_scores(formula: Formula, lone: float) -> None:
    scores, mask = torch.tensor([0.35] * 7 + [0.4]), torch.ones(8, 1, dtype=torch.bool)
    found, _ = group_advantages(scores, mask[:, 0], torch.zeros(8, dtype=torch.int64), mask, formula)
    FLOAT32.check(found[7, 0], lone)
    assert len(set(found[:7, 0].tolist())) == 1


def test_response_without_tokens_has_no_weight_in_weighted_mean() -> None:
    # Without the third response: (3 + 0) / 4; the second group: 5 / 3 as before.
    mask = MASK & (torch.arange(6) != 2)[:, None]
    found, _ = group_advantages(SCORES, VALID, GROUPS, mask, groups.from_weighted_mean)
    FLOAT32.check(found, spread([0.25, -0.75, 0.0, 4 / 3, 0.0, -2 / 3]) * mask)
    # A single response with tokens has advantage 0; a group without tokens has no baseline and no token.
    own = torch.tensor([True, False, False, False, False, False])[:, None] & MASK
    found, _ = group_advantages(SCORES, VALID, GROUPS, own, groups.from_weighted_mean)
    EXACT.check(found, torch.zeros(MASK.shape))


def test_ties_for_the_best_have_advantage_zero() -> None:
    scores = torch.tensor([2.0, 0.5, 2.0, 3.0, 0.0, 1.0])
    found, equal = group_advantages(scores, VALID, GROUPS, MASK, groups.best_only)
    EXACT.check(found, spread([0.0, 0.0, 0.0, 2.0, 0.0, 0.0]))
    assert equal == 0.0


def test_advantages_are_zero_where_masked_out() -> None:
    # A truncated response that is filtered has a score, but no unmasked token: it is in the mean of its group.
    mask = MASK & (torch.arange(6) != 2)[:, None]
    found, _ = group_advantages(SCORES, VALID, GROUPS, mask, from_mean)
    EXACT.check(found, spread([0.0, -1.0, 1.0, 1.0, 0.0, -1.0]) * mask)
    assert not found[~mask].any()


@each_formula
@pytest.mark.parametrize("score", [0.1, 0.7, 1 / 3, -1e-20, 123456.789, 3e38, 0.0])
def test_equal_scores_have_advantage_exactly_zero(formula: Formula, score: float) -> None:
    for size in (2, 3, 7, 10):
        valid, mask = torch.ones(size, dtype=torch.bool), torch.ones(size, 2).bool()
        groups = torch.zeros(size, dtype=torch.int64)
        found, equal = group_advantages(torch.full((size,), score), valid, groups, mask, formula)
        EXACT.check(found, torch.zeros(size, 2))
        assert equal == 1.0


@each_formula
@pytest.mark.parametrize("num_valid", [0, 1])
def test_group_with_fewer_than_two_scores_has_advantage_zero(formula: Formula, num_valid: int) -> None:
    # Group 1 keeps its advantages; half of the groups are equal.
    valid = VALID & ((torch.arange(6) > 2) | (torch.arange(6) < num_valid))
    found, equal = group_advantages(SCORES, valid, GROUPS, MASK, formula)
    whole, _ = group_advantages(SCORES, VALID, GROUPS, MASK, formula)
    EXACT.check(found, whole * (GROUPS == 1)[:, None])
    assert found[3].any()
    assert equal == 0.5


def test_scores_with_large_offset_keep_their_differences() -> None:
    # The float32 numbers around 2^24 are 2 apart: deviations -1, 1, -1, 1, std sqrt(4 / 3).
    scores = 2.0**24 + torch.tensor([0.0, 2.0, 0.0, 2.0])
    valid, mask = torch.ones(4, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool)
    found, _ = group_advantages(scores, valid, torch.zeros(4, dtype=torch.int64), mask, standardized)
    size = 1 / (math.sqrt(4 / 3) + 1e-6)
    FLOAT32.check(found[:, 0], torch.tensor([-size, size, -size, size]))


@each_formula
@pytest.mark.parametrize("seed", range(5))
def test_order_of_rows_does_not_change_a_bit(formula: Formula, seed: int) -> None:
    scores, valid, indices, mask = random_batch(seed)
    expected, fraction = group_advantages(scores, valid, indices, mask, formula)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    found, same = group_advantages(scores[order], valid[order], indices[order], mask[order], formula)
    assert torch.equal(found, expected[order])
    assert same == fraction


@pytest.mark.parametrize("order", [*permutations(range(4))])
def test_mean_is_rounded_once_in_any_order(order: tuple[int, ...]) -> None:
    # The mean is (2^60 + 1 - 2^60 + 3) / 4 = 1; a running sum in float64 would lose the small scores.
    scores, valid, mask = torch.tensor([2.0**60, 1.0, -(2.0**60), 3.0]), torch.ones(4) > 0, torch.ones(4, 1) > 0
    rows = list(order)
    found, _ = group_advantages(scores[rows], valid, torch.zeros(4, dtype=torch.int64), mask, from_mean)
    EXACT.check(found[:, 0], torch.tensor([2.0**60, 0.0, -(2.0**60), 2.0])[rows])


@each_formula
def test_padding_and_other_groups_do_not_change_a_bit(formula: Formula) -> None:
    scores, valid, indices, mask = random_batch(0)
    expected, _ = group_advantages(scores, valid, indices, mask, formula)
    padded = torch.cat([mask, torch.zeros(len(mask), 5, dtype=torch.bool)], dim=1)
    found, _ = group_advantages(scores, valid, indices, padded, formula)
    assert torch.equal(found[:, : mask.shape[1]], expected)
    assert not found[:, mask.shape[1] :].any()
    own = indices == 3
    alone, _ = group_advantages(scores[own], valid[own], indices[own], mask[own], formula)
    assert torch.equal(alone, expected[own])


def random_batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores, valid rows, groups and mask of 8 prompts x 9 samples; one response in ten has no score."""
    valid = torch.rand(72, generator=torch.Generator().manual_seed(seed)) < 0.9
    scores = torch.where(valid, 5 + 3 * normal(72, seed=seed), 0)
    mask = holey_mask(72, 6, seed=seed) & valid[:, None]
    return scores, valid, torch.arange(8).repeat_interleave(9), mask
