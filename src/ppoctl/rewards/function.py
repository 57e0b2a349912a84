"""Scoring functions: their result for one response, and the specification from which a scorer process imports them.
Scorer processes import this module, so it imports only the standard library."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppoctl.core.batch.scores import Outcome, ScoreRequest

_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class RewardValue:
    """Score of one response, and further metrics by name."""

    value: float
    extras: Mapping[str, float] = field(default_factory=dict)
    token_values: Sequence[float] | None = None
    """One value for each token of the response; `value` is their sum. None: the response has one score."""
    answer: str | None = None
    """Answer extracted from the response. Equal answers have the same spelling, so that responses can vote. None: no
    answer."""


BatchFunction = Callable[[Sequence[ScoreRequest]], Sequence[RewardValue | BaseException]]
"""Function that receives requests, and returns a value or an error for each of them."""


class NoScoreError(Exception):
    """Error of a scoring function that sets the outcome of the sample. Any other error has the outcome `error`."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


ScoringFunction = Callable[..., RewardValue]
"""Function `function(request, **options)` that scores a `ScoreRequest`. If the function raises, the sample has the
outcome `error` and no score."""


@dataclass(frozen=True)
class ScorerSpec:
    """A scoring function in the form in which JSON sends it to a child process: `module:name`, and keyword
    arguments."""

    entry: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments; JSON can represent their values."""
    opens: bool = False
    """Whether the entry is called once, with the options, when a child starts, and returns a `BatchFunction`."""
    batch_size: int = 1
    """Maximum number of requests that a child receives together."""
    known_as: str = ""
    """Name of the scorer in the error message of a failed start; empty: the entry."""
    hint: str = ""
    """Command that shows why the start fails; empty: a command that imports the entry's module."""


def is_trainable(value: float) -> bool:
    """Whether a number is finite and within the range of float32."""
    return math.isfinite(value) and abs(value) <= _FLOAT32_MAX


def ending(text: str, chars: int | None) -> str:
    """Return the last `chars` characters of a text; None: the whole text."""
    return text if chars is None else text[-chars:]
