"""Score requests for tests, and a helper that returns all scores of a scorer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppoctl.batch.scores import Finish, Score, ScoreRequest

if TYPE_CHECKING:
    from ppoctl.ports import Scorer  # imported late: scorer processes do not need torch


def request(response: str, truth: str | None = "good", *, prompt_id: str = "train/0") -> ScoreRequest:
    """Return a request for a response; the question is not read by the scorers of these tests."""
    return ScoreRequest(prompt_id, "", (), response, truth, {}, "terminated")


def word_ids(text: str, finish: Finish) -> tuple[int, ...]:
    """Return one token id for each word, and one for the end."""
    return tuple(range(len(text.split()) + (finish == "terminated")))


def scores(scorer: "Scorer", requests: Sequence[ScoreRequest]) -> list[Score]:
    """Submit all requests, and return the scores in order."""
    futures = [scorer.submit(request) for request in requests]
    return [future.result() for future in futures]
