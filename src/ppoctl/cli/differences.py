"""What `ppoctl compare` says of two runs before their samples: recipe, sources, versions, figures side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.cli import render
from ppoctl.cli.summary import key_figures

if TYPE_CHECKING:
    from ppoctl.store.run_paths import RunPaths

ValuePair = tuple[Any, Any]
"""One thing in both runs; None where one of them does not have it."""
Point = tuple[int, float]


@dataclass(frozen=True)
class MetricDifference:
    """One figure of two runs."""

    name: str
    step: int | None
    """The last step at which both have it; None: there is none."""
    at_step: ValuePair
    best: tuple[Point | None, Point | None]
    """Step and value of each run's best; None where no value is better than another."""

    @property
    def differs(self) -> bool:
        return not all(_same(*pair) for pair in (self.at_step, self.best))


@dataclass(frozen=True)
class Differences:
    """In what two runs differ, by name: keys of the recipes of their newest steps, digests of sources, versions. Key
    figures and evaluations, whether they differ or not."""

    keys: dict[str, ValuePair]
    sources: dict[str, ValuePair]
    versions: dict[str, ValuePair]
    metrics: list[MetricDifference]


def differences(left: "RunPaths", right: "RunPaths") -> Differences:
    """The differences of two runs. Raises where one is no run, or where its recipe or journal is damaged."""
    from ppoctl.loading.load import from_resolved
    from ppoctl.loop.expectations import history
    from ppoctl.recipe.fingerprint import differences as keys
    from ppoctl.store import run_dir
    from ppoctl.store.journal import read_lines

    facts = [run_dir.facts(layout) for layout in (left, right)]
    asked = [run_dir.recipes(layout) for layout in (left, right)]
    recipes = [from_resolved(found[max(found)]) for found in asked]
    series = [history(read_lines(layout.journal)) for layout in (left, right)]
    names = {name: None for each in series for name in (*key_figures(each).values(), *filter(_is_mean_of_set, each))}
    return Differences(
        keys={key: (old, new) for key, old, new in keys(*recipes) if key != "name"},
        sources=_of_each("sources", facts),
        versions=_of_each("versions", facts),
        metrics=[_figure(name, [each.get(name, []) for each in series]) for name in names],
    )


def _is_mean_of_set(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("score_mean")


def _of_each(name: str, facts: Sequence[Mapping[str, Any]]) -> dict[str, ValuePair]:
    left, right = (each.get(name, {}) for each in facts)
    both = {key: (left.get(key), right.get(key)) for key in {**left, **right}}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _figure(name: str, series: Sequence[Sequence[Point]]) -> MetricDifference:
    from ppoctl.metric_registry import find

    left, right = map(dict, series)
    step = max(left.keys() & right.keys(), default=None)
    metric = find(name)
    better = {"higher": 1, "lower": -1, None: 0}[metric.better if metric else None]
    # The first of equal ones; nan is the best of nothing.
    points = [[point for point in each if point[1] == point[1]] if better else [] for each in series]
    best = [max(each, key=lambda point: (better * point[1], -point[0]), default=None) for each in points]
    at_step = (None, None) if step is None else (left[step], right[step])
    return MetricDifference(name, step, at_step, (best[0], best[1]))


def as_json(found: Differences) -> dict[str, Any]:
    """The differences as part of a JSON object, values left and right."""
    from ppoctl.errors import without_secrets

    def safe(value: Any) -> Any:
        return without_secrets(value) if isinstance(value, str) else value

    figures = [
        {
            "metric": each.name,
            "step": each.step,
            "values": each.at_step,
            "best": [None if point is None else {"step": point[0], "value": point[1]} for point in each.best],
        }
        for each in found.metrics
    ]
    keys = {key: [safe(value) for value in values] for key, values in found.keys.items()}
    return {"keys": keys, "sources": found.sources, "versions": found.versions, "figures": figures}


def print_differences(found: Differences, runs: tuple[Path, Path]) -> None:
    """Print what differs, and in a line what does not."""
    from ppoctl.loading.explain import shown

    sides = (runs[0].name, runs[1].name) if runs[0].name != runs[1].name else (str(runs[0]), str(runs[1]))
    keys = {key: tuple(None if each is None else shown(each) for each in pair) for key, pair in found.keys.items()}
    sources = {name: tuple(each and each[:12] for each in pair) for name, pair in found.sources.items()}
    tables = {"recipe key": keys, "source": sources, "version of": found.versions}
    words = {"recipe key": "recipe", "source": "sources", "version of": "versions"}
    for title, rows in tables.items():
        if rows:
            render.table([(name, *map(_text, pair)) for name, pair in rows.items()], (title, *sides))
            render.line()
    if equal := [words[title] for title, rows in tables.items() if not rows]:
        render.line(f"equal: {', '.join(equal)}")
    _print_metrics(found.metrics, sides)
    render.line()


def _print_metrics(figures: Sequence[MetricDifference], sides: tuple[str, str]) -> None:
    common = max((each.step for each in figures if each.step is not None), default=None)
    differing = [each for each in figures if each.differs]
    if differing:
        render.line()
        rows = [
            (each.name, _text(each.step), *map(_number, each.at_step), *map(_best, each.best)) for each in differing
        ]
        render.table(rows, ("figure", "step", *sides, *(f"best of {side}" for side in sides)))
    elif common is None:
        render.line("figures: none that both have")
    else:
        render.line(f"figures: equal up to step {common}")


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _best(point: Point | None) -> str:
    return "-" if point is None else f"{point[1]:.4g} at {point[0]}"


def _same(left: Any, right: Any) -> bool:
    return bool(left == right or (left != left and right != right))  # nan is not itself
