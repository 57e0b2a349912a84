"""What a chart shows: curves of one figure, and what happened on the way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """One figure of one run over its steps."""

    run: int
    """Place of the run in the legend."""
    points: tuple[Point, ...]
    """Step and value, by step; all values are finite."""


@dataclass(frozen=True)
class Panel:
    """One figure of all runs."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    is_rare: bool = False
    """Whether it is taken at some steps only: its points are marked."""
    events: tuple[tuple[int, str], ...] = ()
    """Step and word of what happened to a run."""

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step with a point."""
        steps = [step for curve in self.curves for step, _ in curve.points]
        return min(steps), max(steps)

    @property
    def values(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        values = [value for curve in self.curves for _, value in curve.points]
        return min(values), max(values)


def curve(run: int, points: Sequence[Point], smooth: int = 1) -> Curve:
    """The curve of what was recorded; values that are no numbers are left out. `smooth`: each is the mean of so many,
    itself and those before it."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    values = [value for _, value in finite]
    told = [(step, fmean(values[max(0, place - smooth + 1) : place + 1])) for place, (step, _) in enumerate(finite)]
    return Curve(run, tuple(told))


def aligned(panels: Sequence[Panel]) -> tuple[int, int]:
    """The steps of a picture in which panels stand below each other."""
    spans = [panel.steps for panel in panels]
    return min(low for low, _ in spans), max(high for _, high in spans)
