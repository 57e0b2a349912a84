"""`ppoctl compare`: the differences between two runs and between their samples, or between two evaluations."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, open_run, run_names, typed_run
from ppoctl.cli.summary import key_figures
from ppoctl.core.errors import ExitCode

if TYPE_CHECKING:
    from ppoctl.store.compare_evaluations import ComparedSet
    from ppoctl.store.compare_ledgers import Comparison
    from ppoctl.store.recorded_run import RecordedRun


ValuePair = tuple[Any, Any]
"""The value of a key in each of the two runs. None: the run does not have the key."""
Point = tuple[int, float]


@dataclass(frozen=True)
class MetricDifference:
    """One metric of two runs."""

    name: str
    step: int | None
    """The last step at which both runs have the metric. None: there is no such step."""
    at_step: ValuePair
    best: tuple[Point | None, Point | None]
    """Step and value of the best value of each run. None: neither higher nor lower values are better."""

    @property
    def differs(self) -> bool:
        return not all(_same(*pair) for pair in (self.at_step, self.best))


@dataclass(frozen=True)
class Differences:
    """Differences between two runs, by name: recipe keys, digests of sources, versions.

    Recipe keys are compared at the newest step of each run. `metrics` contains all key metrics and
    evaluations, including metrics that do not differ.
    """

    keys: dict[str, ValuePair]
    sources: dict[str, ValuePair]
    versions: dict[str, ValuePair]
    metrics: list[MetricDifference]


def compare(
    run: RunArgument,
    other: Annotated[
        Path, typer.Argument(metavar="OTHER", help="Another run.", callback=typed_run, autocompletion=run_names)
    ],
    evaluations: Annotated[
        bool,
        typer.Option(
            "--eval",
            help="Compare evaluations: the newest of each run, or `80-eval` folders, or files from `eval --out`.",
        ),
    ] = False,
    shown: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="With --eval: list at most N changed prompts per set.")
    ] = 10,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with code 10 if samples (with --eval: scores) differ, else with code 0."
        ),
    ] = False,
    json: JsonOption = False,
) -> int | None:
    """Compare two runs, or two evaluations. For runs, prints the differences in recipe, sources, versions and
    metrics, and the first sample that differs, in ledger order. With --eval, compares evaluations prompt by prompt,
    and prints the difference of their scores with its confidence interval and p-value."""
    if evaluations:
        differ = _compare_evaluations(run, other, shown, as_json=json)
    else:
        differ = _compare_runs(run, other, as_json=json)
    return int(ExitCode.DIFFERENT) if exit_code and differ else None


def _compare_runs(run: Path, other: Path, *, as_json: bool) -> bool:
    """Print the differences between two runs, and return whether the samples of the runs differ."""
    from ppoctl.store.compare_ledgers import compare as side_by_side

    left, right = open_run(run), open_run(other)
    found = _differences(left, right)
    samples = side_by_side(left.paths.ledger, right.paths.ledger)
    if as_json:
        render.json({**_as_json(found), **asdict(samples)})
    else:
        _print_differences(found, (run, other))
        _print_samples(samples, run, other)
    return samples.first is not None


def _print_samples(found: "Comparison", run: Path, other: Path) -> None:
    render.line(f"equal samples: {found.equal_samples} of {found.samples[0]} and {found.samples[1]}")
    render.line(f"equal steps: {found.last_equal_step}")
    for folder, steps in zip((run, other), found.lost_steps, strict=True):
        if steps:
            render.line(f"skipped, missing in the ledger of {folder}: {', '.join(map(str, steps))}")
    if found.first is None:
        render.line("no difference")
        return
    first = found.first
    prompt = render.printable(first.prompt)
    render.line(f"first difference: step {first.step}, prompt {prompt}, sample {first.sample}")
    render.table([(name, *map(str, values)) for name, values in first.what.items()], ("", str(run), str(other)))


def _differences(*runs: "RecordedRun") -> Differences:
    """Return the differences between two runs.

    Raises RecipeError if a folder is not a run, and StorageError if the recipe or journal of a run is damaged.
    """
    from ppoctl.recipe.fingerprint import differences as keys
    from ppoctl.recipe.loading.load import from_resolved
    from ppoctl.show.report.expectations import history

    facts = [run.facts for run in runs]
    recipes = [from_resolved(run.recipe) for run in runs]
    series = [history(run.lines) for run in runs]
    names = {name: None for each in series for name in (*key_figures(each).values(), *filter(_is_mean_of_set, each))}
    return Differences(
        keys={key: (old, new) for key, old, new in keys(*recipes) if key != "name"},
        sources=_of_each("sources", facts),
        versions=_of_each("versions", facts),
        metrics=[_metric(name, [each.get(name, []) for each in series]) for name in names],
    )


def _is_mean_of_set(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("score_mean")


def _of_each(name: str, facts: Sequence[Mapping[str, Any]]) -> dict[str, ValuePair]:
    left, right = (each.get(name, {}) for each in facts)
    both = {key: (left.get(key), right.get(key)) for key in {**left, **right}}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _metric(name: str, series: Sequence[Sequence[Point]]) -> MetricDifference:
    from ppoctl.core.metric_registry import find

    left, right = map(dict, series)
    step = max(left.keys() & right.keys(), default=None)
    metric = find(name)
    better = {"higher": 1, "lower": -1, None: 0}[metric.better if metric else None]
    # If several values are equal, the earliest is the best. nan is excluded: it is not equal to itself.
    points = [[point for point in each if point[1] == point[1]] if better else [] for each in series]
    best = [max(each, key=lambda point: (better * point[1], -point[0]), default=None) for each in points]
    at_step = (None, None) if step is None else (left[step], right[step])
    return MetricDifference(name, step, at_step, (best[0], best[1]))


def _as_json(found: Differences) -> dict[str, Any]:
    """Return the differences as fields of a JSON object. Each difference is a pair (left, right)."""
    from ppoctl.core.errors import without_secrets

    def safe(value: Any) -> Any:
        return without_secrets(value) if isinstance(value, str) else value

    metrics = [
        {
            "metric": each.name,
            "step": each.step,
            "values": each.at_step,
            "best": [None if point is None else {"step": point[0], "value": point[1]} for point in each.best],
        }
        for each in found.metrics
    ]
    keys = {key: [safe(value) for value in values] for key, values in found.keys.items()}
    return {"keys": keys, "sources": found.sources, "versions": found.versions, "figures": metrics}


def _print_differences(found: Differences, runs: tuple[Path, Path]) -> None:
    """Print one table for each kind of difference, and one line that names the kinds without differences."""
    from ppoctl.recipe.loading.explain import shown

    sides = (runs[0].name, runs[1].name) if runs[0].name != runs[1].name else (str(runs[0]), str(runs[1]))
    keys = {key: tuple(None if each is None else shown(each) for each in pair) for key, pair in found.keys.items()}
    sources = {
        name: pair if name == "clock" else tuple(each and each[:12] for each in pair)
        for name, pair in found.sources.items()
    }
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


def _print_metrics(metrics: Sequence[MetricDifference], sides: tuple[str, str]) -> None:
    common = max((each.step for each in metrics if each.step is not None), default=None)
    differing = [each for each in metrics if each.differs]
    if differing:
        render.line()
        rows = [
            (each.name, _text(each.step), *map(_number, each.at_step), *map(_best, each.best)) for each in differing
        ]
        render.table(rows, ("metric", "step", *sides, *(f"best of {side}" for side in sides)))
    elif common is None:
        render.line("metrics: the runs have none in common")
    else:
        render.line(f"metrics: equal up to step {common}")


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _best(point: Point | None) -> str:
    return "-" if point is None else f"{point[1]:.4g} at {point[0]}"


def _same(left: Any, right: Any) -> bool:
    return bool(left == right or (left != left and right != right))  # two values that are nan count as equal here


def _compare_evaluations(left: Path, right: Path, shown: int, *, as_json: bool) -> bool:
    """Print the differences between two evaluations.

    Returns whether a score differs, or is in only one of the two evaluations.
    """
    from ppoctl.store import eval_samples
    from ppoctl.store.compare_evaluations import compare_evaluations, not_compared

    both = eval_samples.read(left), eval_samples.read(right)
    found = compare_evaluations(*both)
    alone = not_compared(*both, found)
    if as_json:
        render.json({"sets": [asdict(each) for each in found], "not_compared": alone})
    else:
        _print_evaluations(found, alone, (str(left), str(right)), shown)
    return bool(alone) or any(each.changed or each.left_out for each in found)


def _print_evaluations(
    found: "Sequence[ComparedSet]", alone: Sequence[str], sides: tuple[str, str], shown: int
) -> None:
    rows = []
    for each in found:
        difference = each.difference
        scores = (f"{score:.4g}" for score in each.scores)
        interval = "" if difference.low is None else f" [{difference.low:+.4f}, {difference.high:+.4f}]"
        effect = "-" if difference.effect is None else f"{difference.effect:+.2f}"
        numbers = (f"{difference.mean:+.4f}{interval}", effect, f"{difference.p_value:.2g}")
        rows.append((f"{each.set} {each.mode}", str(difference.pairs), *scores, *numbers))
    head = ("set", "prompts", *sides, "difference [95 %]", "effect", "p")
    render.table(rows, head)
    for each in found:
        pairs = each.difference
        render.line()
        left_out = f", {each.left_out} not compared (no score in one of the two)" if each.left_out else ""
        equal = pairs.pairs - pairs.better - pairs.worse
        render.line(f"{each.set} {each.mode}: {pairs.better} better, {pairs.worse} worse, {equal} equal{left_out}")
        changed = [
            (render.printable(row.prompt), *(f"{score:.4g}" for score in row.scores)) for row in each.changed[:shown]
        ]
        if changed:
            render.table(changed, ("prompt", *sides))
        if len(each.changed) > shown:
            render.line(f"and {len(each.changed) - shown} more: --show {len(each.changed)}")
    if alone:
        render.line()
        render.line(f"not compared, because no prompt has a score in both: {', '.join(alone)}")
