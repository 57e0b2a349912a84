"""Requests for scorers, and all scores of some at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppoctl.batch.scores import Finish, Score, ScoreRequest

if TYPE_CHECKING:
    from ppoctl.ports import Scorer  # with torch, which processes that are started to score have no use for


def request(response: str, truth: str | None = "good", *, prompt_id: str = "train/0") -> ScoreRequest:
    """A response to a question that scorers here do not read."""
    return ScoreRequest(prompt_id, "", (), response, truth, {}, "terminated")


def word_ids(text: str, finish: Finish) -> tuple[int, ...]:
    """A token for each word, and one for the end."""
    return tuple(range(len(text.split()) + (finish == "terminated")))


def scores(scorer: "Scorer", requests: Sequence[ScoreRequest]) -> list[Score]:
    """Submit all, and wait for them in order."""
    futures = [scorer.submit(each) for each in requests]
    return [future.result() for future in futures]
