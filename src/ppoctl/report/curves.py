"""The figures of runs as charts: which stand where, what surrounds them, and what each says in a sentence. Light."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ppoctl import metric_registry
from ppoctl.report.formatting import figure, rounded
from ppoctl.report.run_reader import History, ReadRun

Json = dict[str, Any]
Points = Sequence[tuple[int, float]]

GROUPS: dict[str, tuple[metric_registry.Metric, ...]] = {
    "Reward": (
        metric_registry.REWARD_SCORE_MEAN,
        metric_registry.REWARD_PART_MEAN,
        metric_registry.REWARD_ERROR_FRAC,
    ),
    "Evaluation": (),
    "How far the actor moves": (
        metric_registry.POLICY_APPROX_KL,
        metric_registry.KL_REFERENCE_MEAN,
        metric_registry.POLICY_CLIP_FRAC,
        metric_registry.POLICY_ENTROPY_MEAN,
        metric_registry.POLICY_RATIO_P50,
        metric_registry.POLICY_GRAD_NORM,
    ),
    "What the critic knows": (
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
    "Sampler against trainer": (metric_registry.MISMATCH_GAP_K3, metric_registry.MISMATCH_GAP_MEAN_ABS),
}
"""Headings of the curves, and the figures under each that come first; those of evaluations say so themselves."""
FURTHER = "Further figures"
POINTS = 600
"""Points of a figure, over all runs; longer histories are thinned, and the page says so."""
FEWEST = 160
"""Points of each run in the charts that are seen first, however many runs there are."""


@dataclass(frozen=True)
class Band:
    """What surrounds a figure."""

    low: str
    high: str
    description: str
    is_spread: bool = False
    """Both are the same distance from the figure, not values."""


_ERROR = "bars: one standard error on either side"
BANDS = {
    metric_registry.REWARD_SCORE_MEAN.name: Band(
        metric_registry.REWARD_SCORE_STD.name,
        metric_registry.REWARD_SCORE_STD.name,
        "shaded: mean +- spread of the scores",
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
    """Lists of steps that several figures share, so that the page has each once."""

    lists: list[list[int]] = field(default_factory=list)
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def at(self, steps: Sequence[int]) -> int:
        """Where the list lies."""
        key = tuple(steps)
        if key not in self._known:
            self._known[key] = len(self.lists)
            self.lists.append(list(steps))
        return self._known[key]


def groups(runs: Sequence[ReadRun]) -> list[tuple[str, list[str]]]:
    """Headings and the names of the figures under each, as far as any of the runs reports them; what stands under no
    heading, and is part of no band, comes last."""
    names = sorted({name for run in runs for name in run.series})
    found: list[tuple[str, list[str]]] = []
    for title, wanted in GROUPS.items():
        if title == "Evaluation":
            here = [name for name in names if _is_key_evaluation(name)]
        else:
            here = [name for metric in wanted for name in names if metric_registry.find(name) == metric]
        found.append((title, here))
    placed = {name for _, here in found for name in here}
    around = {part for name in placed if (band := band_of(name)) is not None for part in (band.low, band.high)}
    found.append((FURTHER, [name for name in names if name not in placed | around]))
    return [(title, here) for title, here in found if here]


def _is_key_evaluation(name: str) -> bool:
    metric = metric_registry.find(name)
    return metric_registry.eval_set(name) is not None and metric is not None and metric.better == "higher"


def band_of(name: str) -> Band | None:
    """What surrounds a figure; None: nothing does."""
    if metric_registry.eval_set(name) is not None:
        return Band(f"{name}_stderr", f"{name}_stderr", _ERROR, is_spread=True)
    return BANDS.get(name)


def chart(name: str, runs: Sequence[ReadRun], steps: Steps, *, fewest: int = FEWEST) -> Json:
    """A figure as the page shows it: what it is, a sentence for each run, and its points under `data`."""
    metric, band = metric_registry.find(name), band_of(name)
    limit = max(POINTS // len(runs), fewest)
    told, data, is_thinned, has_band = [], [], False, False
    for number, run in enumerate(runs):
        points = run.series.get(name)
        if not points:
            continue
        shown = thinned(points, limit)
        is_thinned |= len(shown) < len(points)
        low, high = _around(run.series, band, shown)
        has_band |= bool(low)
        values = [rounded(value) for _, value in shown]
        data.append({"run": number, "steps": steps.at([step for step, _ in shown]), "values": values})
        if low:
            data[-1] |= {"low": low, "high": high}
        told.append((run.label if len(runs) > 1 else "", summary(points)))
    return {
        "name": name,
        "unit": "" if metric is None else metric.unit,
        "says": "" if metric is None else metric.description,
        "healthy": "" if metric is None else metric.healthy,
        "band": band.description if band is not None and has_band else "",
        "is_thinned": is_thinned,
        "told": told,
        "data": {"name": name, "dots": metric_registry.eval_set(name) is not None, "series": data},
    }


def _around(series: History, band: Band | None, shown: Points) -> tuple[list[float | None], list[float | None]]:
    """Lower and upper edge at the points that are shown; empty where there are none."""
    if band is None or band.low not in series or band.high not in series:
        return [], []
    low, high = dict(series[band.low]), dict(series[band.high])

    def edges(table: Mapping[int, float], sign: int) -> list[float | None]:
        around = [(value, table.get(step)) for step, value in shown]
        if band.is_spread:
            return [None if spread is None else rounded(value + sign * spread) for value, spread in around]
        return [rounded(edge) for _, edge in around]

    return edges(low, -1), edges(high, 1)


def thinned(points: Points, limit: int) -> Points:
    """The points where they are few; else the lowest and the highest of each of `limit / 2` stretches, so that no
    spike is lost, with the first and the last."""
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
    """A curve in a sentence: where it begins and ends, and its extremes where they lie between."""
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return f"{figure(first)} at step {first_step}."
    verb = "stays at" if figure(first) == figure(last) else "rises from" if last > first else "falls from"
    ends = f"at step {first_step} to {figure(last)} at step {last_step}"
    if verb == "stays at":
        ends = f"from step {first_step} to step {last_step}"
    low_step, low = min(points, key=lambda point: point[1])
    high_step, high = max(points, key=lambda point: point[1])
    between = [f"lowest {figure(low)} at step {low_step}"] * (figure(low) not in _shown((first, last)))
    between += [f"highest {figure(high)} at step {high_step}"] * (figure(high) not in _shown((first, last)))
    return f"{verb} {figure(first)} {ends}" + "".join(f"; {each}" for each in between) + "."


def _shown(values: Iterable[float]) -> set[str]:
    return {figure(value) for value in values}
