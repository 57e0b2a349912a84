"""What an engine must show: the trainer's numbers, name by name, and the canary's log-probs."""

import math
from dataclasses import replace

import pytest
import torch

from ppoctl.errors import WeightSyncError
from ppoctl.weights.checksum import checksum_of
from ppoctl.weights.proof import CANARY_TOKENS, Canary, LoadedWeight, SentChecksums, require_equal

ONES, TWOS = checksum_of(torch.ones(3)), checksum_of(torch.full((3,), 2.0))
NAMES = ("a", "b")


def sent(**checksums: object) -> SentChecksums:
    made = SentChecksums()
    made.add(checksums)
    return made


A, B = LoadedWeight("a", ONES, tied_to=None), LoadedWeight("b", TWOS, tied_to=None)
HEAD = LoadedWeight("head", ONES, tied_to="a")


def test_what_was_announced_and_sent_and_loaded_is_proven() -> None:
    require_equal(NAMES, sent(a=ONES, b=TWOS), [A, B])
    require_equal(NAMES, sent(a=ONES, b=TWOS), [A, B, HEAD])


@pytest.mark.parametrize(
    ("arrived", "loaded", "says"),
    [
        (sent(a=ONES), [A, B], "`b` was announced and never left the trainer \\(1 of 2 did\\)"),
        (sent(a=ONES, b=TWOS), [A], "`b` was sent and has no place in the engine"),
        (sent(a=ONES, b=TWOS, c=ONES), [A, B], "`c` was sent and is not among the announced names"),
        (sent(a=ONES, b=TWOS), [A, B, LoadedWeight("c", ONES, tied_to=None)], "`c` is held by the engine"),
        (sent(a=ONES, b=ONES), [A, B], "`b` was sent as float32.* and the engine holds float32"),
        (
            sent(a=ONES, b=TWOS),
            [A, B, replace(HEAD, checksum=TWOS)],
            "`head` was sent with `a`, to which",
        ),
    ],
)
def test_a_difference_is_named(arrived: SentChecksums, loaded: list[LoadedWeight], says: str) -> None:
    with pytest.raises(WeightSyncError, match=says):
        require_equal(NAMES, arrived, loaded)


def test_a_tensor_leaves_the_trainer_once() -> None:
    once = sent(a=ONES)
    with pytest.raises(WeightSyncError, match="`a` left the trainer twice"):
        once.add({"a": ONES})


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
