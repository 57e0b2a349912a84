"""Scales of axes: where a value stands, and at which round numbers there are labels."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear way from values to places: 0 at `low`, 1 at `high`."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Where the value stands, 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def scale(low: float, high: float) -> Scale:
    """A scale with room for both; one value alone has as much above as below it."""
    if low < high:
        return Scale(low, high)
    room = abs(low) / 10 or 1.0
    return Scale(low - room, high + room)


def ticks(on: Scale, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers on the scale, at most so many, at equal distances of 1, 2 or 5 times a power of ten; `whole`: no
    fractions."""
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
    """The round number for an axis."""
    return f"{value + 0.0:.6g}"
