"""Scorer over a model: submitted texts are scored together, each once, in an order independent of submission."""

from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest

from ppoctl.core.batch.scores import RewardModel, ScoreRequest
from ppoctl.rewards.batched_model import CollectingScorer
from rewards.asking import request


class Lengths:
    """A reward model whose tokens are letters and whose score is their number. It records its calls."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[int, ...]]] = []

    def tokens(self, request: ScoreRequest) -> tuple[int, ...]:
        if not request.response:
            raise ValueError("no token")
        return tuple(map(ord, request.response))

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        self.asked.append(list(texts))
        return [float(len(text)) for text in texts]


class Broken(Lengths):
    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        raise OSError("the model is gone")


def test_collecting_scorer_scores_all_on_first_result() -> None:
    model = Lengths()
    assert isinstance(model, RewardModel)
    scorer = CollectingScorer(model)
    futures = [scorer.submit(request(text)) for text in ("bb", "a", "ccc")]
    assert model.asked == []
    assert [future.result().value for future in futures] == [2.0, 1.0, 3.0]
    assert len(model.asked) == 1
    assert scorer.submit(request("dddd")).result().value == 4.0
    assert len(model.asked) == 2


def test_collecting_scorer_scores_each_text_once_in_fixed_order() -> None:
    seen = []
    for texts in (("b", "a", "c", "a"), ("c", "a", "a", "b")):
        model = Lengths()
        scorer = CollectingScorer(model)
        futures = [scorer.submit(request(text)) for text in texts]
        assert {future.result().value for future in futures} == {1.0}
        seen.append(model.asked)
    assert seen[0] == seen[1] == [[(97,), (98,), (99,)]]


def test_unreadable_text_has_no_score_and_affects_no_other() -> None:
    scorer = CollectingScorer(Lengths())
    good, bad = scorer.submit(request("a")), scorer.submit(request(""))
    assert (bad.result().value, bad.result().outcome, bad.result().message) == (None, "refused", "no token")
    assert good.result().value == 1.0


def test_model_failure_raises_for_every_request() -> None:
    scorer = CollectingScorer(Broken())
    futures = [scorer.submit(request(text)) for text in "ab"]
    for future in futures:
        with pytest.raises(OSError, match="the model is gone"):
            future.result()


def test_cancelled_requests_are_not_scored() -> None:
    model = Lengths()
    scorer = CollectingScorer(model)
    given_up, kept = scorer.submit(request("a")), scorer.submit(request("b"))
    assert given_up.cancel()
    assert kept.result().value == 1.0
    assert model.asked == [[(98,)]]
    left = scorer.submit(request("c"))
    scorer.close()
    with pytest.raises(CancelledError):
        left.result()
