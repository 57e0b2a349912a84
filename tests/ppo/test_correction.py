"""Importance weights and rejection of sampled tokens: by hand, and for any ratios."""

import math
from functools import partial

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.formulas.importance import (
    inside_sequence_weights,
    inside_weights,
    kept_by_divergence,
    kept_by_gap,
    kept_by_ratio,
    log_ratios,
    normalized,
    plain_weights,
    truncated_sequence_weights,
    truncated_weights,
    unit_weights,
)
from tolerance import EXACT, FLOAT32

# Two sequences of three tokens; the hole in the second has ratio 9.
RATIOS = torch.tensor([[4.0, 0.25, 1.5], [0.5, 9.0, 0.8]])
MASK = torch.tensor([[True, True, True], [True, False, True]])
LOGS = torch.where(MASK, RATIOS.log(), 0)
BOUNDS = {"min_ratio": 0.4, "max_ratio": 2.0}


def test_log_ratio_is_trainer_minus_sampler():
    # The trainer's probability is twice the sampler's: log 2, not -log 2. The masked position is NaN.
    logprobs = torch.tensor([[math.log(0.5), math.nan]], requires_grad=True)
    sampler = torch.tensor([[math.log(0.25), math.inf]])
    found = log_ratios(logprobs, sampler, torch.tensor([[True, False]]))
    FLOAT32.check(found, torch.tensor([[math.log(2), 0.0]]))
    assert not found.requires_grad


def test_token_weights_by_hand():
    # 4 -> 2, 0.25 -> 0.4, 1.5; 0.5, hole, 0.8
    found = truncated_weights(LOGS, MASK, **BOUNDS)
    FLOAT32.check(found.weights, torch.tensor([[2.0, 0.4, 1.5], [0.5, 0.0, 0.8]]))
    assert found.outside.tolist() == [[True, True, False], [False, False, False]]
    without = truncated_weights(LOGS, MASK, min_ratio=0.0, max_ratio=2.0)
    FLOAT32.check(without.weights, torch.tensor([[2.0, 0.25, 1.5], [0.5, 0.0, 0.8]]))
    assert without.outside.tolist() == [[True, False, False], [False, False, False]]


@pytest.mark.parametrize(
    "weigh", [truncated_weights, truncated_sequence_weights, inside_weights, inside_sequence_weights]
)
@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.5, 1.0)])
def test_ratio_at_bound_is_inside(weigh, low, high):
    found = weigh(torch.zeros(2, 3), MASK, min_ratio=low, max_ratio=high)
    assert not found.outside.any()
    EXACT.check(found.weights, MASK.float())


def test_sequence_weights_by_hand():
    # 4 x 0.25 x 1.5 = 1.5; 0.5 x 0.8 = 0.4, clipped to 0.45
    found = truncated_sequence_weights(LOGS, MASK, min_ratio=0.45, max_ratio=2.0)
    FLOAT32.check(found.weights, torch.tensor([[1.5, 1.5, 1.5], [0.45, 0.0, 0.45]]))
    assert found.outside.tolist() == [[False, False, False], [True, False, True]]
    capped = truncated_sequence_weights(LOGS, MASK, min_ratio=0.0, max_ratio=1.2)
    FLOAT32.check(capped.weights, torch.tensor([[1.2, 1.2, 1.2], [0.4, 0.0, 0.4]]))
    assert capped.outside.tolist() == [[True, True, True], [False, False, False]]


def test_icepop_weights_by_hand():
    # 4 and 0.25 are outside and get weight 0
    found = inside_weights(LOGS, MASK, **BOUNDS)
    FLOAT32.check(found.weights, torch.tensor([[0.0, 0.0, 1.5], [0.5, 0.0, 0.8]]))
    assert found.outside.tolist() == [[True, True, False], [False, False, False]]


# A third sequence, whose last token is masked out: its ratio is 6.
THREE = torch.cat([RATIOS, torch.tensor([[3.0, 2.0, 9.0]])])
THREE_MASK = torch.cat([MASK, torch.tensor([[True, True, False]])])
THREE_LOGS = torch.where(THREE_MASK, THREE.log(), 0)


def test_sequence_icepop_weights_by_hand():
    # The ratios of the sequences are 1.5, 0.4 and 6. verl computes the same weights for "sequence" and "0.45_2.0".
    found = inside_sequence_weights(THREE_LOGS, THREE_MASK, min_ratio=0.45, max_ratio=2.0)
    FLOAT32.check(found.weights, torch.tensor([[1.5, 1.5, 1.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert found.outside.tolist() == [[False] * 3, [True, False, True], [True, True, False]]
    wider = inside_sequence_weights(THREE_LOGS, THREE_MASK, min_ratio=0.3, max_ratio=2.0)
    FLOAT32.check(wider.weights, torch.tensor([[1.5, 1.5, 1.5], [0.4, 0.0, 0.4], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("weights", "over", "expected"),
    [
        # (2 + 0.25 + 1.5 + 0.5 + 0.8 + 2 + 2) / 7 = 1.292857
        (partial(truncated_weights, min_ratio=0.0, max_ratio=2.0), "tokens",
         [[1.5469613, 0.1933702, 1.1602210], [0.3867403, 0.0, 0.6187845], [1.5469613, 1.5469613, 0.0]]),
        # (1.5 + 0.4 + 2) / 3 = 1.3
        (partial(truncated_sequence_weights, min_ratio=0.0, max_ratio=2.0), "sequences",
         [[1.1538462, 1.1538462, 1.1538462], [0.3076923, 0.0, 0.3076923], [1.5384615, 1.5384615, 0.0]]),
        # (1.5 + 0.4 + 0) / 3 = 0.633333
        (partial(inside_sequence_weights, min_ratio=0.3, max_ratio=2.0), "sequences",
         [[2.3684211, 2.3684211, 2.3684211], [0.6315789, 0.0, 0.6315789], [0.0, 0.0, 0.0]]),
    ],
)  # fmt: skip
def test_normalized_weights_equal_those_of_verl(weights, over, expected):
    """Weights of verl's `compute_rollout_correction_weights` (August 2026) with rollout_is_batch_normalize."""
    found = weights(THREE_LOGS, THREE_MASK).weights
    FLOAT32.check(normalized(found, THREE_MASK, THREE_MASK, over=over), torch.tensor(expected))


def test_mean_before_rejection_includes_rejected_tokens():
    weights = plain_weights(LOGS, MASK).weights
    kept = torch.tensor([[True, False, True], [False, False, True]])
    # Over kept tokens (4 + 1.5 + 0.8) / 3; over all tokens 7.05 / 5; over sequences (5.75 / 3 + 1.3 / 2) / 2.
    for over, mean in (("kept_tokens", 2.1), ("tokens", 1.41), ("sequences", 1.2833333)):
        FLOAT32.check(normalized(weights, MASK, kept, over=over), weights * kept / mean)
    # A sequence without a sampled token does not count.
    padded, padded_mask = (torch.cat([each, torch.zeros(1, 3, dtype=each.dtype)]) for each in (weights, MASK))
    found = normalized(padded, padded_mask, padded_mask, over="sequences")
    FLOAT32.check(found, padded / 1.2833333)


def test_plain_and_unit_weights_by_hand():
    FLOAT32.check(plain_weights(LOGS, MASK).weights, torch.where(MASK, RATIOS, 0))
    EXACT.check(unit_weights(LOGS, MASK).weights, MASK.float())
    assert not (plain_weights(LOGS, MASK).outside | unit_weights(LOGS, MASK).outside).any()


def test_normalized_weights_have_mean_one():
    # (4 + 0.25 + 1.5 + 0.5 + 0.8) / 5 = 1.41
    weights = plain_weights(LOGS, MASK).weights
    over_kept = partial(normalized, over="kept_tokens")
    FLOAT32.check(over_kept(weights, MASK, MASK), weights / 1.41)
    for over in ("kept_tokens", "tokens", "sequences"):
        EXACT.check(normalized(weights * 0, MASK, MASK, over=over), weights * 0)
    # The mean is over the kept tokens: 4, 1.5, 0.8 have the mean 2.1.
    kept = torch.tensor([[True, False, True], [False, False, True]])
    FLOAT32.check(over_kept(weights * kept, MASK, kept), weights * kept / 2.1)
    # The weight of a token that is not kept is 0.
    FLOAT32.check(over_kept(weights, MASK, kept), weights * kept / 2.1)


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("token", 0.5, 2.0, [[False, False, True], [True, False, True]]),
        ("token", None, 2.0, [[False, True, True], [True, False, True]]),
        ("token", 0.6, None, [[True, False, True], [False, False, True]]),
        # 1.5 and 0.4
        ("sequence_sum", 0.39, 1.4, [[False, False, False], [True, False, True]]),
        ("sequence_sum", 0.41, 1.6, [[True, True, True], [False, False, False]]),
        # 1.5 ** (1/3) = 1.145 and 0.4 ** (1/2) = 0.632
        ("sequence_mean", 0.63, 1.14, [[False, False, False], [True, False, True]]),
        ("sequence_mean", 0.64, 1.15, [[True, True, True], [False, False, False]]),
        # the worst tokens: 0.25 and 4; 0.5 and 0.8
        ("sequence_max", 0.3, None, [[False, False, False], [True, False, True]]),
        ("sequence_max", None, 0.9, [[False, False, False], [True, False, True]]),
        ("sequence_max", 0.6, 5.0, [[False, False, False], [False, False, False]]),
        ("sequence_max", 0.24, 4.1, [[True, True, True], [True, False, True]]),
    ],
)
def test_rejection_by_ratio_by_hand(level, low, high, expected):
    found = kept_by_ratio(LOGS, MASK, level=level, min_ratio=low, max_ratio=high)
    assert found.tolist() == expected


def test_ratio_bounds_are_not_inverted():
    # verl's k1 bounds the inverse: there 0.8 to 5 rejects 1.65 and keeps 0.37.
    logs = torch.tensor([[math.log(1.65), math.log(0.37)]])
    kept = kept_by_ratio(logs, torch.ones(1, 2) > 0, level="token", min_ratio=0.8, max_ratio=5.0)
    assert kept.tolist() == [[True, False]]


# (log r)^2 / 2: 0.961, 0.961, 0.0822; 0.240, 0.0249. r - 1 - log r: 1.614, 0.636, 0.0945; 0.193, 0.0231.
@pytest.mark.parametrize(
    ("statistic", "level", "limit", "expected"),
    [
        ("k2", "token", 0.5, [[False, False, True], [True, False, True]]),
        ("k2", "token", 0.1, [[False, False, True], [False, False, True]]),
        ("k2", "sequence_sum", 0.27, [[False, False, False], [True, False, True]]),  # 2.004, 0.265
        ("k2", "sequence_sum", 0.26, [[False, False, False], [False, False, False]]),
        ("k2", "sequence_mean", 0.67, [[True, True, True], [True, False, True]]),  # 0.668, 0.133
        ("k2", "sequence_mean", 0.66, [[False, False, False], [True, False, True]]),
        ("k2", "sequence_max", 0.25, [[False, False, False], [True, False, True]]),
        ("k3", "token", 0.7, [[False, True, True], [True, False, True]]),
        ("k3", "sequence_sum", 2.34, [[False, False, False], [True, False, True]]),  # 2.345, 0.216
        ("k3", "sequence_sum", 2.35, [[True, True, True], [True, False, True]]),
        ("k3", "sequence_mean", 0.11, [[False, False, False], [True, False, True]]),  # 0.782, 0.108
        ("k3", "sequence_mean", 0.10, [[False, False, False], [False, False, False]]),
        ("k3", "sequence_max", 1.61, [[False, False, False], [True, False, True]]),
        ("k3", "sequence_max", 1.62, [[True, True, True], [True, False, True]]),
    ],
)
def test_rejection_by_divergence_by_hand(statistic, level, limit, expected):
    found = kept_by_divergence(LOGS, MASK, statistic=statistic, level=level, max_nats=limit)
    assert found.tolist() == expected


def test_rejection_by_sequence_gap_by_hand():
    # exp|log r|: (4 + 4 + 1.5) / 3 = 3.167; (2 + 1.25) / 2 = 1.625
    assert kept_by_gap(LOGS, MASK, max_gap=3.1).tolist() == [[False] * 3, [True, False, True]]
    assert kept_by_gap(LOGS, MASK, max_gap=1.62).tolist() == [[False] * 3] * 2
    assert kept_by_gap(LOGS, MASK, max_gap=3.2).tolist() == MASK.tolist()


LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")
WEIGHS = {
    "tis": partial(truncated_weights, **BOUNDS),
    "tis_sequence": partial(truncated_sequence_weights, **BOUNDS),
    "icepop": partial(inside_weights, **BOUNDS),
    "icepop_sequence": partial(inside_sequence_weights, **BOUNDS),
    "plain": plain_weights,
    "unit": unit_weights,
}
KEEPS = {
    **{f"k1 {level}": partial(kept_by_ratio, level=level, **BOUNDS) for level in LEVELS},
    **{
        f"{kind} {level}": partial(kept_by_divergence, statistic=kind, level=level, max_nats=0.3)
        for kind in ("k2", "k3")
        for level in LEVELS
    },
    "gap": partial(kept_by_gap, max_gap=1.5),
}


def moved(x):
    """Return the grid with rows in reverse order and padding columns appended."""
    return torch.nn.functional.pad(x.flip(0), (0, 3))


def test_correction_ignores_padding_and_row_order():
    mask = holey_mask(5, 6, seed=0)
    spread = torch.tensor([[0.02], [0.1], [0.4], [1.2], [3.0]])
    logs = torch.where(mask, normal(5, 6, seed=1) * spread, 0)
    for weigh in WEIGHS.values():
        FLOAT32.check(weigh(moved(logs), moved(mask)).weights, moved(weigh(logs, mask).weights))
        EXACT.check(weigh(moved(logs), moved(mask)).outside, moved(weigh(logs, mask).outside))
    for name, keep in KEEPS.items():
        kept = keep(logs, mask)
        assert kept.any(), name
        assert kept.sum() < mask.sum(), name
        EXACT.check(keep(moved(logs), moved(mask)), moved(kept))


@given(
    seed=st.integers(0, 99),
    size=st.sampled_from([0.0, 1e-3, 1.0, 300.0, 1e30]),
    garbage=st.sampled_from(GARBAGE),
    empty=st.sampled_from([(), (0,), (0, 1, 2)]),
    columns=st.sampled_from([1, 4]),
)
def test_correction_is_finite_and_zero_where_masked_out(seed, size, garbage, empty, columns):
    mask = holey_mask(3, columns, seed=seed)
    mask[list(empty)] = False
    logprobs = poisoned(normal(3, columns, seed=seed) * size, mask, garbage)
    logs = log_ratios(logprobs, poisoned(torch.zeros(3, columns), mask, -garbage), mask)
    assert torch.isfinite(logs).all()
    for weigh in WEIGHS.values():
        found = weigh(logs, mask)
        assert torch.isfinite(found.weights).all()
        assert (found.weights >= 0).all()
        assert not (found.weights.bool() | found.outside)[~mask].any()
        if mask.any():
            for over in ("kept_tokens", "tokens", "sequences"):
                assert torch.isfinite(normalized(found.weights, mask, mask, over=over)).all()
    for keep in KEEPS.values():
        assert not (keep(logs, mask) & ~mask).any()


def test_ratio_at_limit_is_kept():
    two = torch.full((2, 3), math.log(2)) * MASK
    for level in ("token", "sequence_mean", "sequence_max"):
        assert kept_by_ratio(two, MASK, level=level, min_ratio=None, max_ratio=2.0).equal(MASK), level
        assert kept_by_ratio(-two, MASK, level=level, min_ratio=0.5, max_ratio=None).equal(MASK), level
    # A log-ratio of 1: k2 is 1/2. Ratios of 1: the gap is 1.
    assert kept_by_divergence(1.0 * MASK, MASK, statistic="k2", level="token", max_nats=0.5).equal(MASK)
    assert kept_by_gap(0.0 * MASK, MASK, max_gap=1.0).equal(MASK)
