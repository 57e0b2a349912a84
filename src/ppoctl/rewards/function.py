"""A scoring function: what it says about one response, and how a child process finds it. Children import it: standard
library only."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class RewardValue:
    """One score, and further figures by name."""

    value: float
    extras: Mapping[str, float] = field(default_factory=dict)


ScoringFunction = Callable[..., RewardValue]
"""`function(request, **options)` of a `ScoreRequest`. It may raise: the sample then has the outcome `error`, never a
score."""


@dataclass(frozen=True)
class ScorerSpec:
    """Which function scores, in words that travel to a child: `module:name`, and its keyword arguments."""

    entry: str
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)


def is_trainable(figure: float) -> bool:
    """Whether a number survives the way into a float32 tensor."""
    return math.isfinite(figure) and abs(figure) <= _FLOAT32_MAX
