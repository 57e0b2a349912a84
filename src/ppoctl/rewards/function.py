"""Scoring functions: their result for one response, and the spec by which a scorer process finds them. Scorer
processes import it: standard library only."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppoctl.batch.scores import Outcome, ScoreRequest

_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class RewardValue:
    """One score, and further metrics by name."""

    value: float
    extras: Mapping[str, float] = field(default_factory=dict)
    token_values: Sequence[float] | None = None
    """One value for each token of the response, whose sum is `value`; None: the response has one score."""
    answer: str | None = None
    """Answer extracted from the response, with one spelling for equal answers, so that responses can vote; None: no
    answer."""


BatchFunction = Callable[[Sequence[ScoreRequest]], Sequence[RewardValue | BaseException]]
"""`function(requests)`, which returns a value or an error for each request."""


class NoScoreError(Exception):
    """Error of a scoring function that sets the outcome of the sample. Any other error has the outcome `error`."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


ScoringFunction = Callable[..., RewardValue]
"""`function(request, **options)` for a `ScoreRequest`. If it raises, the sample has the outcome `error`, never a
score."""


@dataclass(frozen=True)
class ScorerSpec:
    """The scoring function in a form that JSON can carry to a child process: `module:name`, and keyword arguments."""

    entry: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values that JSON can represent."""
    opens: bool = False
    """Whether the entry is called once, with the options, when a child starts, and returns a `BatchFunction`."""
    batch_size: int = 1
    """Maximum number of requests that a child receives together."""
    known_as: str = ""
    """Name of the scorer in the error of a failed start; empty: the entry."""
    hint: str = ""
    """Command that shows why the start fails; empty: a command that imports the entry's module."""


def is_trainable(value: float) -> bool:
    """Whether a number is finite and within the range of float32."""
    return math.isfinite(value) and abs(value) <= _FLOAT32_MAX


def ending(text: str, chars: int | None) -> str:
    """Return the last `chars` characters of a text; None: the whole text."""
    return text if chars is None else text[-chars:]
