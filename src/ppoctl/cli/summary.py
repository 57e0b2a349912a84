"""The summary that `train`, `rollout` and `resume` print when they end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.cli import render
from ppoctl.core.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppoctl.show.report.expectations import RunResult

RUNS = Path("runs")
"""Default folder of run directories."""


def key_figures(series: "Mapping[str, Any]") -> dict[str, str]:
    """Return label -> metric name for the key metrics in `series`. Evaluations are last, labelled by their names."""
    from ppoctl.core import metric_registry

    shown = {
        "reward": metric_registry.REWARD_SCORE_MEAN.name,
        "truncated": metric_registry.ROLLOUT_TRUNCATED_FRAC.name,
        "rounds": metric_registry.GROUPS_ROUNDS.name,
        "kept groups": metric_registry.GROUPS_KEPT.name,
        "kl per step": metric_registry.POLICY_APPROX_KL.name,
        "entropy": metric_registry.POLICY_ENTROPY_MEAN.name,
        "explained variance": metric_registry.VALUE_EXPLAINED_VARIANCE.name,
        "log-prob difference": metric_registry.MISMATCH_GAP_MAX_ABS.name,
    }
    passed = {name: name for name in sorted(series) if name.endswith("pass_at_1")}
    return {label: name for label, name in {**shown, **passed}.items() if name in series}


def print_summary(ended: "RunResult", *, as_json: bool) -> None:
    """Print the final table with the first and the last value of each key metric.

    Raises ExpectationError if the run does not meet the expectations of its recipe.
    """
    from ppoctl.show.report.expectations import history, require_met
    from ppoctl.store.jobs import longer_command

    series = history(ended.lines)
    rows: list[tuple[Any, ...]] = []
    for label, name in key_figures(series).items():
        points = series[name]
        rows.append((label, points[0][0], f"{points[0][1]:.4g}", points[-1][0], f"{points[-1][1]:.4g}"))
    expect = [vars(result) for result in ended.results]
    if as_json:
        metrics = {metric: {"first": points[0], "last": points[-1]} for metric, points in sorted(series.items())}
        unmet = not all(result.met for result in ended.results)
        state = "unmet" if unmet else "finished"
        render.json({"run": str(ended.paths.root), "state": state, "figures": metrics, "expect": expect})
    else:
        render.table(rows, ("metric", "step", "first", "step", "last"))
        if expect:
            render.line()
            render.table([expected_row(result) for result in expect], EXPECTED)
        render.line()
        render.line(f"run: {ended.paths.root}")
    steps = max((step for points in series.values() for step, _ in points), default=1)
    longer = longer_command(ended.paths.root, steps, ended_early=ended.early_end is not None)
    require_met(ended.results, longer=longer)


EXPECTED = ("expected", "reached", "bound", "")


def expected_row(result: "Mapping[str, Any]") -> tuple[str, str, str, str]:
    """Return the table row of one expectation, with the columns `EXPECTED`."""
    reached = "-" if result["value"] is None else f"{result['value']:.4g}"
    return result["metric"], reached, result["bound"], "met" if result["met"] else "UNMET"


def print_rollout(ended: "RunResult", *, as_json: bool) -> None:
    """Print the metrics of the generated samples, and the run directory."""
    lines = [line for line in ended.lines if line.get("stage") in ("rollout", "reward")]
    metrics = {metric: value for line in lines for metric, value in line["figures"].items()}
    if as_json:
        render.json({"run": str(ended.paths.root), "figures": metrics})
        return
    render.table([(metric, f"{value:.4g}") for metric, value in sorted(metrics.items())], ("metric", "value"))
    render.line()
    render.line(f"run: {ended.paths.root}")
    render.print_stderr(f"look at a sample: ppoctl show {quoted(ended.paths.root)} --step 1")
