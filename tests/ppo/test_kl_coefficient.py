"""The KL coefficient that follows a target: the measured KL, and how far the coefficient moves."""

import math

import pytest
import torch
from grids import holey_mask, normal
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.formulas.kl_coefficient import KlTarget

# Two sequences of three and of two tokens, with a hole; a third is fully masked.
KL = torch.tensor([[0.1, 9.0, 0.3], [0.5, 0.1, 7.0], [3.0, 3.0, 3.0]])
MASK = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
PER_TOKEN = KlTarget(0.1, "token", 1000)
PER_SEQUENCE = KlTarget(0.1, "sequence", 1000)


def test_measured_kl_by_hand():
    # Means 0.4 / 2 and 0.6 / 2; sums 0.4 and 0.6. The mean over the two sequences that have tokens.
    assert PER_TOKEN.measured(KL, MASK) == pytest.approx((0.2 + 0.3) / 2)
    assert PER_SEQUENCE.measured(KL, MASK) == pytest.approx((0.4 + 0.6) / 2)


def test_per_token_kl_weighs_sequences_equally():
    # Means 0.2 of two tokens and 0.9 of one: over tokens it would be 1.3 / 3.
    kl, mask = torch.tensor([[0.1, 0.3], [0.9, 0.0]]), torch.tensor([[True, True], [True, False]])
    assert PER_TOKEN.measured(kl, mask) == pytest.approx(0.55)


def test_measured_kl_ignores_padding_and_row_order():
    kl, mask = normal(4, 5, seed=0), holey_mask(4, 5, seed=1)
    moved = [torch.nn.functional.pad(x.flip(0), (0, 3)) for x in (kl, mask)]
    for target in (PER_TOKEN, PER_SEQUENCE):
        assert target.measured(*moved) == pytest.approx(target.measured(kl, mask), rel=1e-12)


def test_measured_kl_requires_an_unmasked_token():
    with pytest.raises(ValueError, match="0 unmasked tokens"):
        PER_TOKEN.measured(KL, MASK & False)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.1, 0.5),  # at the target: e = 0
        (0.11, 0.5 * (1 + 0.1 * 200 / 1000)),  # e = 0.1
        (0.095, 0.5 * (1 - 0.05 * 200 / 1000)),  # e = -0.05
        (0.4, 0.5 * (1 + 0.2 * 200 / 1000)),  # e = 3, clipped to 0.2
        (0.0, 0.5 * (1 - 0.2 * 200 / 1000)),  # e = -1, clipped to -0.2
        (-5.0, 0.5 * (1 - 0.2 * 200 / 1000)),  # k1 may be negative
    ],
)
def test_next_kl_coefficient_by_hand(measured, expected):
    assert PER_TOKEN.next_coef(0.5, measured, num_seqs=200) == pytest.approx(expected)


@given(
    measured=st.floats(-1e30, 1e30),
    coef=st.floats(1e-30, 1e6),
    target=st.floats(1e-9, 1e3),
    num_seqs=st.integers(1, 4999),
)
def test_next_kl_coefficient_is_positive_and_follows_target(measured, coef, target, num_seqs):
    found = KlTarget(target, "token", 1000).next_coef(coef, measured, num_seqs=num_seqs)
    assert math.isfinite(found)
    assert found > 0
    assert (found >= coef) if measured >= target else (found <= coef)
