"""The canary's tokens and its verdicts."""

import math

import pytest

from ppoctl.engines.vllm.canary import CANARY_TOKENS, Tolerance, canary_tokens
from ppoctl.errors import WeightSyncError


def test_tokens_are_fixed_varied_and_inside_vocabulary_and_window() -> None:
    tokens = canary_tokens(151_936, 4096)
    assert tokens == canary_tokens(151_936, 4096)
    assert len(set(tokens)) == len(tokens) == CANARY_TOKENS
    assert max(tokens) > 100_000
    assert max(canary_tokens(272, 4096)) < 272
    assert len(canary_tokens(272, 20)) == 19


def test_float32_bounds_the_largest_gap() -> None:
    tolerance = Tolerance.of("float32", None)
    assert tolerance.check([-1.0, -2.0], [-1.0005, -2.0]) == pytest.approx(5e-4)
    with pytest.raises(WeightSyncError, match=r"differ by 0\.002 nats .*worst at token 2"):
        tolerance.check([-1.0, -2.0], [-1.0, -2.002])


def test_bfloat16_bounds_the_mean_gap() -> None:
    tolerance = Tolerance.of("bfloat16", None)
    assert tolerance.check([-1.0, -2.0, -3.0], [-1.0, -2.9, -3.0]) == pytest.approx(0.3)
    with pytest.raises(WeightSyncError, match=r"mean over 2 tokens; allowed 0\.5"):
        tolerance.check([-1.0, -2.0], [-1.6, -2.6])


def test_the_recipe_sets_the_limit() -> None:
    assert Tolerance.of("float32", 0.1).check([-1.0], [-1.05]) == pytest.approx(0.05)
    with pytest.raises(WeightSyncError, match=r"allowed 0\.01"):
        Tolerance.of("bfloat16", 0.01).check([-1.0], [-1.05])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_log_prob_that_is_no_number_is_a_gap(bad: float) -> None:
    with pytest.raises(WeightSyncError, match="worst at token 2"):
        Tolerance.of("bfloat16", None).check([-1.0, bad, -1.0], [-1.0, -1.0, -1.0])


def test_lists_of_different_length_are_a_gap() -> None:
    with pytest.raises(WeightSyncError, match="1 scored tokens in the generator and 2 in the trainer"):
        Tolerance.of("float32", None).check([-1.0], [-1.0, -1.0])
