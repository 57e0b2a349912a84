"""Score requests for tests, and a helper that returns all scores of a scorer."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from ppoctl.core.batch.scores import Finish, Score, Scorer, ScoreRequest


def request(response: str, truth: str | None = "good", *, prompt_id: str = "train/0") -> ScoreRequest:
    """Return a request for a response; the question is not read by the scorers of these tests."""
    return ScoreRequest(prompt_id, "", (), response, truth, {}, "terminated")


def word_ids(text: str, finish: Finish) -> tuple[int, ...]:
    """Return one token id for each word, and one for the end."""
    return tuple(range(len(text.split()) + (finish == "terminated")))


def scores(scorer: Scorer, requests: Sequence[ScoreRequest]) -> list[Score]:
    """Submit all requests, and return the scores in order."""
    futures = [scorer.submit(request) for request in requests]
    return [future.result() for future in futures]


def scores_of(table: Any, *requests: ScoreRequest) -> list[Score]:
    """Open the scorer of a table, and return its scores in order."""
    with closing(table.open()) as scorer:
        return scores(scorer, requests)
