"""Contents of a chart: the curves of one metric, and the events of the runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ppoctl.show.chart.axis import Axis, step_axis, value_axis

Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """One metric of one run over its steps."""

    run: int
    """Index of the run in the legend."""
    points: tuple[Point, ...]
    """Step and value, in step order; all values are finite."""


@dataclass(frozen=True)
class Panel:
    """One metric of all runs."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    is_rare: bool = False
    """Whether the metric is measured only at some steps. The points of such a metric are marked."""
    events: tuple[tuple[int, str], ...] = ()
    """Step and name of each event of a run."""

    @property
    def values(self) -> Axis:
        """The axis of the values."""
        return value_axis(value for curve in self.curves for _, value in curve.points)


def curve(run: int, points: Sequence[Point], smooth: int = 1) -> Curve:
    """Return the curve of the recorded points, without values that are not finite.

    If `smooth` is above 1, each value is replaced by the mean of the last `smooth` values, including itself.
    """
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    values = [value for _, value in finite]
    smoothed = [(step, fmean(values[max(0, at - smooth + 1) : at + 1])) for at, (step, _) in enumerate(finite)]
    return Curve(run, tuple(smoothed))


def aligned(panels: Sequence[Panel]) -> Axis:
    """Return the common axis of the steps of stacked panels."""
    return step_axis(step for panel in panels for curve in panel.curves for step, _ in curve.points)
