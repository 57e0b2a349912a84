"""Scoring that begins while other responses are still generated: each response gets its own score."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from ppoctl.algorithms.stages.overlapped_scoring import OverlappedScorer, request_about
from ppoctl.core.batch.prompts import Prompt
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.ports import Sample

PROMPT = Prompt("a", (5,), "[user] why?", "x")
SAMPLE = Sample("a#0", (2, 1), (-0.5, -1.0), True, "2", "actor@0")


class Waits:
    """A scorer that never scores: it keeps each request with its future."""

    def __init__(self) -> None:
        self.submitted: list[tuple[ScoreRequest, Future[Score]]] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        self.submitted.append((request, Future()))
        return self.submitted[-1][1]

    def close(self) -> None:
        pass


def test_equal_responses_get_separate_scores() -> None:
    scorer = Waits()
    overlapped = OverlappedScorer(scorer)
    request = request_about(PROMPT, SAMPLE)
    overlapped.start(PROMPT, SAMPLE)
    overlapped.start(PROMPT, replace(SAMPLE, key="a#1"))
    futures = [overlapped.submit(request) for _ in range(3)]
    assert len({id(future) for future in futures}) == 3
    assert futures == [future for _, future in scorer.submitted]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_id": "b"},
        {"response": "3"},
        {"finish": "truncated"},
        {"token_ids": (3, 1)},
        {"truth": "y"},
        {"fields": {"level": 3}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_response_that_differs_in_any_field_is_scored_separately(change: dict[str, object]) -> None:
    scorer = Waits()
    overlapped = OverlappedScorer(scorer)
    overlapped.start(PROMPT, SAMPLE)
    other = replace(request_about(PROMPT, SAMPLE), **change)  # type: ignore[arg-type]
    assert overlapped.submit(other) is scorer.submitted[1][1]
    assert scorer.submitted[1][0] == other
    assert overlapped.submit(request_about(PROMPT, SAMPLE)) is scorer.submitted[0][1]


def test_unused_early_scores_are_cancelled_before_flush() -> None:
    class Settles(Waits):
        def flush(self) -> None:
            self.left = [future.cancelled() for _, future in self.submitted]

    scorer = Settles()
    overlapped = OverlappedScorer(scorer)
    overlapped.start(PROMPT, SAMPLE)
    overlapped.start(PROMPT, replace(SAMPLE, text="3"))
    wanted = overlapped.submit(request_about(PROMPT, SAMPLE))
    overlapped.flush()
    assert scorer.left == [False, True]
    assert not wanted.cancelled()
    # A cancelled request is scored again if it is requested later.
    assert overlapped.submit(request_about(PROMPT, replace(SAMPLE, text="3"))) is scorer.submitted[2][1]


def test_scores_of_the_next_step_are_started_and_kept_until_it_submits_them() -> None:
    scorer = Waits()
    overlapped = OverlappedScorer(scorer)
    overlapped.start_of_next(PROMPT, SAMPLE)
    overlapped.flush()
    [(request, future)] = scorer.submitted
    assert not future.cancelled()
    assert overlapped.submit(request) is future
    assert overlapped.submit(request) is scorer.submitted[1][1], "each score is used once"
    assert overlapped._of_next == {}, "nothing is left of a response whose score was used"


def test_scores_of_a_round_that_is_not_needed_are_cancelled() -> None:
    scorer = Waits()
    overlapped = OverlappedScorer(scorer)
    overlapped.start(PROMPT, SAMPLE)
    overlapped.start_of_next(PROMPT, replace(SAMPLE, text="3"))
    overlapped.cancel_next()
    assert [future.cancelled() for _, future in scorer.submitted] == [False, True]
    again = overlapped.submit(request_about(PROMPT, replace(SAMPLE, text="3")))
    assert again is scorer.submitted[2][1], "a cancelled score is not returned"


def test_batch_of_this_step_has_no_response_of_the_next() -> None:
    class Batches(Waits):
        def flush(self) -> None:
            pass

    scorer = Batches()
    OverlappedScorer(scorer).start_of_next(PROMPT, SAMPLE)
    assert not scorer.submitted
