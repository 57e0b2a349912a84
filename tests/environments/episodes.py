"""Pasts of episodes for tests, and helpers that run episodes to their ends."""

from typing import Any

from ppoctl.batch.episodes import EnvironmentRow, Outcome, Past, Turn
from ppoctl.batch.prompts import Json, Message


def past(key: str = "a", truth: str | None = "7", *, seed: int = 5, **fields: Json) -> Past:
    """Return the past of an episode that has not been opened."""
    row = EnvironmentRow(f"train/{key}", "<q>", (Message("user", "how?"),), truth, {"level": 3, **fields})
    return Past(key, row, seed)


def said(text: str, *calls: Any) -> Turn:
    """Return a turn with one token per character."""
    return Turn(text, tuple(range(len(text))), calls)


def outcome_of(future: Any) -> Outcome:
    """Return the outcome of a future."""
    result: Outcome = future.result(timeout=60)
    return result
