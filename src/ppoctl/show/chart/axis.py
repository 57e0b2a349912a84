"""Axes: the range of a curve, the position of a value, and the round numbers that are labelled.

All charts use this module, so that `ppoctl plot` and `ppoctl report` label a curve equally.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MOST_VALUES, MOST_STEPS = 5, 7
"""Maximum numbers of labels on an axis of values and on an axis of steps. They fit on the smallest chart."""
NOISE = 1e-12
"""Relative difference of floating-point numbers that are regarded as equal."""


@dataclass(frozen=True)
class Axis:
    """A linear map from values to positions: 0 at `low`, 1 at `high`."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """The round numbers on the axis, each with its label."""

    def place(self, value: float) -> float:
        """Return the position of the value, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def value_axis(values: Iterable[float | None]) -> Axis:
    """Return the axis from the lowest to the highest value. None and values that are not finite are ignored.

    Equal values are in the middle of the axis; values of 0 are at the low end, because most metrics are not negative.
    """
    return _axis([value for value in values if value is not None and math.isfinite(value)], MOST_VALUES)


def step_axis(steps: Iterable[int]) -> Axis:
    """Return the axis from the first to the last step, whose labels are integers."""
    return _axis(list(steps), MOST_STEPS, least_power=0)


def _axis(values: list[int] | list[float], most: int, least_power: int = -300) -> Axis:
    low, high = float(min(values, default=0)), float(max(values, default=0))
    if high - low <= NOISE * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 10, low + abs(low) / 10) if low else (0.0, 1.0)
    return Axis(low, high, _ticks(low, high, most, least_power))


def _ticks(low: float, high: float, most: int, least_power: int) -> tuple[tuple[float, str], ...]:
    """Return at most `most` multiples of 1, 2 or 5 times a power of ten, as many as possible."""
    first_power = max(least_power, math.floor(math.log10(high - low) - math.log10(most)))
    for power, factor in ((first_power + more, factor) for more in range(3) for factor in (1, 2, 5)):
        distance = float(f"{factor}e{power}")
        first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
        if last - first < most:
            return tuple(_tick(number * factor, power) for number in range(first, last + 1))
    raise AssertionError((low, high, most))


def _tick(number: int, power: int) -> tuple[float, str]:
    """Return `number` times a power of ten, and its label with all digits, so that two labels are never equal."""
    value = float(f"{number}e{power}")
    return value, f"{value:.{max(6, len(str(abs(number))))}g}"
