"""A scoring function: what it says about one response, and how a child process finds it. Children import it: standard
library only."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppoctl.batch.scores import Outcome, ScoreRequest

_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class RewardValue:
    """One score, and further figures by name."""

    value: float
    extras: Mapping[str, float] = field(default_factory=dict)
    token_values: Sequence[float] | None = None
    """One figure for each token of the response, whose sum is `value`; None: the response has one score."""
    answer: str | None = None
    """What was read out of the response as its answer, spelt the same for equal answers, so that responses can vote;
    None: nothing."""


BatchFunction = Callable[[Sequence[ScoreRequest]], Sequence[RewardValue | BaseException]]
"""`function(requests)`, with a value or an error for each of them."""


class NoScoreError(Exception):
    """What a scoring function raises to say what kept it from scoring; any other error has the outcome `error`."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


ScoringFunction = Callable[..., RewardValue]
"""`function(request, **options)` of a `ScoreRequest`. It may raise: the sample then has the outcome `error`, never a
score."""


@dataclass(frozen=True)
class ScorerSpec:
    """Which function scores, in words that travel to a child: `module:name`, and its keyword arguments."""

    entry: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values that JSON has."""
    opens: bool = False
    """Whether the entry is called once, with the options, when a child starts, and returns a `BatchFunction`."""
    batch_size: int = 1
    """Most requests that a child is given together."""
    known_as: str = ""
    """Its name where it cannot be started; empty: the entry."""
    hint: str = ""
    """Command that shows why it cannot; empty: one that imports the entry's module."""


def is_trainable(figure: float) -> bool:
    """Whether a number survives the way into a float32 tensor."""
    return math.isfinite(figure) and abs(figure) <= _FLOAT32_MAX


def ending(text: str, chars: int | None) -> str:
    """The last so many characters of a text; None: all of it."""
    return text if chars is None else text[-chars:]
