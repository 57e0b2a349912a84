"""The canary's tokens, and its checks."""

import math

import pytest

from ppoctl.core.errors import WeightSyncError
from ppoctl.engines.weights.canary import GENERATED_TOKENS, PROMPT_TOKENS, Canary, CanaryScores

FLOAT32 = Canary.of("float32", 64, tolerance=None)
BFLOAT16 = Canary.of("bfloat16", 64, tolerance=None)


def tokens_of(vocab_size: int, *, window: int) -> tuple[int, ...]:
    return Canary.of("float32", window, tolerance=None).tokens(vocab_size)


def scores(prompt: list[float], generated: tuple[int, ...] = (), *logprobs: float) -> CanaryScores:
    """Return scores with one correctly generated token, unless given."""
    return CanaryScores(tuple(prompt), generated or (5,), logprobs or (-0.1,))


def test_canary_tokens_are_fixed_distinct_and_in_range() -> None:
    tokens = tokens_of(151_936, window=4096)
    assert tokens == tokens_of(151_936, window=4096)
    assert len(set(tokens)) == len(tokens) == PROMPT_TOKENS
    assert max(tokens) > 100_000
    assert max(tokens_of(272, window=4096)) < 272


@pytest.mark.parametrize(
    ("window", "prompt", "generated"), [(56, 48, 8), (20, 12, 8), (9, 1, 8), (3, 1, 2), (2, 1, 1)]
)
def test_canary_prompt_and_generated_tokens_fit_window(window: int, prompt: int, generated: int) -> None:
    assert (len(tokens_of(272, window=window)), GENERATED_TOKENS) == (prompt, 8)
    assert Canary.of("float32", window, tolerance=None).num_drawn == generated


def test_float32_canary_bounds_largest_gap() -> None:
    FLOAT32.check(scores([-1.0, -2.0]), scores([-1.0005, -2.0]))
    with pytest.raises(WeightSyncError, match=r"differ by 0\.002 nats .*worst at token 2"):
        FLOAT32.check(scores([-1.0, -2.0]), scores([-1.0, -2.002]))


def test_bfloat16_canary_bounds_mean_gap() -> None:
    BFLOAT16.check(scores([-1.0, -2.0, -3.0]), scores([-1.0, -2.9, -3.0]))
    with pytest.raises(WeightSyncError, match=r"mean over 2 tokens; allowed 0\.5"):
        BFLOAT16.check(scores([-1.0, -2.0]), scores([-1.6, -2.6]))


def test_generated_tokens_are_bounded_separately_from_prompt() -> None:
    """An error in decoding is not averaged away over a correct prompt."""
    right = scores([-1.0] * 47, (1, 2), -0.1, -0.1)
    with pytest.raises(WeightSyncError, match=r"differ by 0\.55 nats \(mean over 2 generated tokens"):
        BFLOAT16.check(scores([-1.0] * 47, (1, 2), -0.1, -1.2), right)
    with pytest.raises(WeightSyncError, match="generated tokens") as caught:
        FLOAT32.check(scores([-1.0] * 47, (1, 2), -0.1, -0.102), right)
    assert "generator.compile=false" in str(caught.value.hint)


def test_generated_tokens_are_compared_up_to_first_difference() -> None:
    """At the first difference, each side has its own most likely token, and the two are nearly equally likely."""
    published = scores([-1.0], (1, 2, 3, 4), -0.1, -0.2, -0.3, -0.4)
    FLOAT32.check(scores([-1.0], (1, 2, 9, 9), -0.1, -0.2, -0.3005, -9.0), published)
    with pytest.raises(WeightSyncError, match="max over 4 tokens of the prompt and the first"):
        FLOAT32.check(scores([-1.0], (1, 2, 9, 9), -0.1, -0.2, -0.35, -0.4), published)


def test_single_generated_token_is_averaged_with_prompt() -> None:
    """In bfloat16 a single token may differ by nats: if the sides differ at the first token, it is averaged with the
    prompt."""
    published = scores([-1.0, -2.0, -3.0], (7, 8), -0.1, -0.2)
    BFLOAT16.check(scores([-1.0, -2.0, -3.0], (5, 8), -1.9, -0.2), published)
    with pytest.raises(WeightSyncError, match=r"mean over 4 tokens of the prompt and the first"):
        BFLOAT16.check(scores([-1.0, -2.0, -3.0], (5, 8), -2.2, -0.2), published)


def test_canary_supports_prompt_of_one_token() -> None:
    FLOAT32.check(scores([], (3,), -0.1), scores([], (3,), -0.1))
    with pytest.raises(WeightSyncError, match="generated tokens"):
        FLOAT32.check(scores([], (3,), -0.1), scores([], (3,), -0.2))


def test_recipe_tolerance_overrides_canary_limit() -> None:
    Canary.of("float32", 64, tolerance=0.1).check(scores([-1.0]), scores([-1.05]))
    with pytest.raises(WeightSyncError, match=r"allowed 0\.01"):
        Canary.of("bfloat16", 64, tolerance=0.01).check(scores([-1.0]), scores([-1.05]))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_non_finite_logprob_fails_canary(bad: float) -> None:
    with pytest.raises(WeightSyncError, match="worst at token 2"):
        BFLOAT16.check(scores([-1.0, bad, -1.0]), scores([-1.0, -1.0, -1.0]))
    with pytest.raises(WeightSyncError, match="worst at token 1"):
        BFLOAT16.check(scores([-1.0], (1,), bad), scores([-1.0], (1,), -0.1))


def test_logprob_lists_of_different_length_fail_canary() -> None:
    with pytest.raises(WeightSyncError, match="1 scored tokens in the generator, but 2 in the trainer"):
        FLOAT32.check(scores([-1.0]), scores([-1.0, -1.0]))
