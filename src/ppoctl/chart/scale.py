"""Scales of axes: the position of a value on an axis, and the round numbers that are labelled."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear map from values to positions: 0 at `low`, 1 at `high`."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return the position of the value, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def scale(low: float, high: float) -> Scale:
    """Return a scale that contains both values. If the values are equal, they are in the middle of the scale."""
    if low < high:
        return Scale(low, high)
    margin = abs(low) / 10 or 1.0
    return Scale(low - margin, high + margin)


def ticks(on: Scale, most: int, *, whole: bool = False) -> list[float]:
    """Return at most `most` round numbers on the scale, at equal distances of 1, 2 or 5 times a power of ten.

    If `whole` is True, the numbers are integers.
    """
    step = 10.0 ** math.floor(math.log10((on.high - on.low) / max(most, 1)))
    factors = [factor * 10.0**power for power in range(3) for factor in (1, 2, 5)]
    for distance in (step * factor for factor in factors):
        if whole and distance < 1:
            continue
        first, last = math.ceil(on.low / distance - 1e-9), math.floor(on.high / distance + 1e-9)
        if last - first + 1 <= most:
            return [float(f"{number * distance:.10g}") for number in range(first, last + 1)]
    return []


def label(value: float) -> str:
    """Return the label of a round number on an axis."""
    return f"{value + 0.0:.6g}"
