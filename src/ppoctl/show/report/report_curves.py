"""Charts of the metrics of runs: groups of charts, bands around curves, and a summary of each curve.

The module imports no torch, vLLM or Megatron.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from ppoctl.core import metric_registry
from ppoctl.show.chart.axis import value_axis
from ppoctl.show.report.formatting import DIGITS, figure, rounded
from ppoctl.show.report.run_reader import History, ReportedRun

Json = dict[str, Any]
Points = Sequence[tuple[int, float]]

GROUPS: dict[str, tuple[metric_registry.Metric, ...]] = {
    "Reward": (
        metric_registry.REWARD_SCORE_MEAN,
        metric_registry.REWARD_PART_MEAN,
        metric_registry.REWARD_ERROR_FRAC,
    ),
    "Evaluation": (),
    "Actor updates": (
        metric_registry.POLICY_APPROX_KL,
        metric_registry.KL_REFERENCE_MEAN,
        metric_registry.POLICY_CLIP_FRAC,
        metric_registry.POLICY_ENTROPY_MEAN,
        metric_registry.POLICY_RATIO_P50,
        metric_registry.POLICY_GRAD_NORM,
    ),
    "Critic": (
        metric_registry.VALUE_EXPLAINED_VARIANCE,
        metric_registry.VALUE_ERROR,
        metric_registry.VALUE_LOSS,
    ),
    "Responses": (metric_registry.ROLLOUT_RESPONSE_TOKENS_MEAN, metric_registry.ROLLOUT_TRUNCATED_FRAC),
    "Learning rates and speed": (
        metric_registry.POLICY_LR,
        metric_registry.VALUE_LR,
        metric_registry.THROUGHPUT_GENERATED,
    ),
    "Sampler and trainer": (metric_registry.MISMATCH_GAP_K3, metric_registry.MISMATCH_GAP_MEAN_ABS),
}
"""Headings of the charts, and the metrics below each heading. Metrics of evaluations are found by their names."""
FURTHER = "Further metrics"
POINTS = 600
"""Maximum number of points of a metric, over all runs. Longer histories are thinned, and the page notes this."""
FEWEST = 160
"""Minimum number of points per run in the charts of `GROUPS`, for any number of runs."""


@dataclass(frozen=True)
class Band:
    """The two metrics between which the area around a curve is shaded."""

    low: str
    high: str
    description: str
    is_spread: bool = False
    """Whether `low` and `high` are distances from the curve. Otherwise they are the edges of the band."""


_ERROR = "bars: one standard error on either side"
BANDS = {
    metric_registry.REWARD_SCORE_MEAN.name: Band(
        metric_registry.REWARD_SCORE_STD.name,
        metric_registry.REWARD_SCORE_STD.name,
        "shaded: mean \u00b1 standard deviation of the scores",
        is_spread=True,
    ),
    metric_registry.ROLLOUT_RESPONSE_TOKENS_MEAN.name: Band(
        metric_registry.ROLLOUT_RESPONSE_TOKENS_MEAN.name,
        metric_registry.ROLLOUT_RESPONSE_TOKENS_MAX.name,
        "shaded: from the mean up to the longest",
    ),
    metric_registry.POLICY_RATIO_P50.name: Band(
        metric_registry.POLICY_RATIO_P01.name, metric_registry.POLICY_RATIO_P99.name, "shaded: 1st to 99th percentile"
    ),
}


@dataclass
class Steps:
    """Lists of steps. Several metrics can share a list, so that the page contains each list only once."""

    lists: list[list[int]] = field(default_factory=list)
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def at(self, steps: Sequence[int]) -> int:
        """Return the index of the list in `lists`. A new list is added first."""
        key = tuple(steps)
        if key not in self._known:
            self._known[key] = len(self.lists)
            self.lists.append(list(steps))
        return self._known[key]


def groups(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Return the headings, each with the names of its metrics that at least one run reports.

    Metrics without a heading and without a band come last.
    """
    names = sorted({name for run in runs for name in run.series})
    grouped: list[tuple[str, list[str]]] = []
    for title, wanted in GROUPS.items():
        if title == "Evaluation":
            members = [name for name in names if _is_key_evaluation(name)]
        else:
            members = [name for metric in wanted for name in names if metric_registry.find(name) == metric]
        grouped.append((title, members))
    placed = {name for _, members in grouped for name in members}
    edges = {edge for name in placed if (band := band_of(name)) is not None for edge in (band.low, band.high)}
    grouped.append((FURTHER, [name for name in names if name not in placed | edges]))
    return [(title, members) for title, members in grouped if members]


def _is_key_evaluation(name: str) -> bool:
    metric = metric_registry.find(name)
    return metric_registry.eval_set(name) is not None and metric is not None and metric.better == "higher"


def band_of(name: str) -> Band | None:
    """Return the band of a metric; None if it has none."""
    if metric_registry.eval_set(name) is not None:
        return Band(f"{name}_stderr", f"{name}_stderr", _ERROR, is_spread=True)
    return BANDS.get(name)


def chart(name: str, runs: Sequence[ReportedRun], steps: Steps, *, fewest: int = FEWEST) -> Json:
    """Return the chart of a metric: its description, a summary for each run, and its points under `data`."""
    metric, band = metric_registry.find(name), band_of(name)
    limit = max(POINTS // len(runs), fewest)
    summaries, data, is_thinned, has_band = [], [], False, False
    drawn: list[float | None] = []  # all values and edges, which the axis contains
    for number, run in enumerate(runs):
        points = run.series.get(name)
        if not points:
            continue
        shown = thinned(points, limit)
        is_thinned |= len(shown) < len(points)
        low, high = _around(run.series, band, shown)
        has_band |= bool(low)
        lines: dict[str, Sequence[float | None]] = {"values": [value for _, value in shown]}
        lines |= {"low": low, "high": high} if low else {}
        drawn += [value for line in lines.values() for value in line]
        data.append((number, steps.at([step for step, _ in shown]), lines))
        summaries.append((run.label if len(runs) > 1 else "", summary(points)))
    axis = value_axis(drawn)
    digits = DIGITS + max(0, int(math.log10(max(abs(axis.low), abs(axis.high)) / (axis.high - axis.low))))
    series = [
        {
            "run": number,
            "steps": at,
            **{key: [rounded(value, digits) for value in line] for key, line in lines.items()},
        }
        for number, at, lines in data
    ]
    return {
        "name": name,
        "unit": "" if metric is None else metric.unit,
        "says": "" if metric is None else metric.description,
        "healthy": "" if metric is None else metric.healthy,
        "band": band.description if band is not None and has_band else "",
        "is_thinned": is_thinned,
        "told": summaries,
        "data": {
            "name": name,
            "dots": metric_registry.eval_set(name) is not None,
            "axis": asdict(axis),
            "series": series,
        },
    }


def _around(series: History, band: Band | None, shown: Points) -> tuple[list[float | None], list[float | None]]:
    """Return the lower and upper edge of the band at the shown points. Both are empty if there is no band."""
    if band is None or band.low not in series or band.high not in series:
        return [], []
    low, high = dict(series[band.low]), dict(series[band.high])

    def edges(table: Mapping[int, float], sign: int) -> list[float | None]:
        pairs = [(value, table.get(step)) for step, value in shown]
        if band.is_spread:
            return [None if distance is None else value + sign * distance for value, distance in pairs]
        return [edge for _, edge in pairs]

    return edges(low, -1), edges(high, 1)


def thinned(points: Points, limit: int) -> Points:
    """Return at most about `limit` points of a curve, without losing a spike.

    A short history keeps all points. A long history is divided into `limit / 2` equal parts. It keeps the lowest and
    the highest point of each part, and the first and the last point of the history.
    """
    if len(points) <= limit:
        return points
    count = max(limit // 2 - 1, 1)
    bounds = [len(points) * number // count for number in range(count + 1)]
    kept = {0, len(points) - 1}
    for start, end in pairwise(bounds):
        kept |= {_extreme(min, points, start, end), _extreme(max, points, start, end)}
    return [points[at] for at in sorted(kept)]


def _extreme(choose: Callable[..., int], points: Points, start: int, end: int) -> int:
    return choose(range(start, end), key=lambda at: points[at][1])


def summary(points: Points) -> str:
    """Return a sentence about a curve: the first and the last value, and the extremes in between."""
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return f"{figure(first)} at step {first_step}."
    if _shown(value for _, value in points) == {figure(first)}:
        return f"stays at {figure(first)} from step {first_step} to step {last_step}."
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    low_step, low = min(finite, key=lambda point: point[1], default=points[0])
    high_step, high = max(finite, key=lambda point: point[1], default=points[0])
    if figure(first) == figure(last):
        verb, ends = "is", f"at step {first_step} and at step {last_step}"
    else:
        verb = "rises from" if last > first else "falls from" if last < first else "goes from"
        ends = f"at step {first_step} to {figure(last)} at step {last_step}"
    between = [f"lowest {figure(low)} at step {low_step}"] * (figure(low) not in _shown((first, last)))
    between += [f"highest {figure(high)} at step {high_step}"] * (figure(high) not in _shown((first, last)))
    strange = next((step for step, value in points if not math.isfinite(value)), None)
    between += [f"not finite at step {strange}"] * (strange is not None)
    return f"{verb} {figure(first)} {ends}" + "".join(f"; {each}" for each in between) + "."


def _shown(values: Iterable[float]) -> set[str]:
    return {figure(value) for value in values}
