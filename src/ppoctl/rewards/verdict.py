"""What a scoring function says about one response. Imported in the children: standard library only."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Verdict:
    """One score, and further figures by name."""

    value: float
    extras: Mapping[str, float] = field(default_factory=dict)


ScoringFunction = Callable[..., Verdict]
"""`function(response, truth, **options)`. It may raise: the sample then has the outcome `error`, never a score."""


def is_trainable(figure: float) -> bool:
    """Whether a number survives the way into a float32 tensor."""
    return math.isfinite(figure) and abs(figure) <= _FLOAT32_MAX
