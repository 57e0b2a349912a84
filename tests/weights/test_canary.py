"""The canary's tokens and its verdicts."""

import math

import pytest

from ppoctl.errors import WeightSyncError
from ppoctl.weights.canary import CANARY_TOKENS, Canary


def tokens_of(vocab_size: int, *, window: int) -> tuple[int, ...]:
    return Canary.of("float32", window, tolerance=None).tokens(vocab_size)


def test_tokens_are_fixed_varied_and_inside_vocabulary_and_window() -> None:
    tokens = tokens_of(151_936, window=4096)
    assert tokens == tokens_of(151_936, window=4096)
    assert len(set(tokens)) == len(tokens) == CANARY_TOKENS
    assert max(tokens) > 100_000
    assert max(tokens_of(272, window=4096)) < 272
    assert len(tokens_of(272, window=20)) == 19


def test_float32_bounds_the_largest_gap() -> None:
    canary = Canary.of("float32", 64, tolerance=None)
    assert canary.check([-1.0, -2.0], [-1.0005, -2.0]) == pytest.approx(5e-4)
    with pytest.raises(WeightSyncError, match=r"differ by 0\.002 nats .*worst at token 2"):
        canary.check([-1.0, -2.0], [-1.0, -2.002])


def test_bfloat16_bounds_the_mean_gap() -> None:
    canary = Canary.of("bfloat16", 64, tolerance=None)
    assert canary.check([-1.0, -2.0, -3.0], [-1.0, -2.9, -3.0]) == pytest.approx(0.3)
    with pytest.raises(WeightSyncError, match=r"mean over 2 tokens; allowed 0\.5"):
        canary.check([-1.0, -2.0], [-1.6, -2.6])


def test_the_recipe_sets_the_limit() -> None:
    assert Canary.of("float32", 64, tolerance=0.1).check([-1.0], [-1.05]) == pytest.approx(0.05)
    with pytest.raises(WeightSyncError, match=r"allowed 0\.01"):
        Canary.of("bfloat16", 64, tolerance=0.01).check([-1.0], [-1.05])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_log_prob_that_is_no_number_is_a_gap(bad: float) -> None:
    with pytest.raises(WeightSyncError, match="worst at token 2"):
        Canary.of("bfloat16", 64, tolerance=None).check([-1.0, bad, -1.0], [-1.0, -1.0, -1.0])


def test_lists_of_different_length_are_a_gap() -> None:
    with pytest.raises(WeightSyncError, match="1 scored tokens in the generator and 2 in the trainer"):
        Canary.of("float32", 64, tolerance=None).check([-1.0], [-1.0, -1.0])
