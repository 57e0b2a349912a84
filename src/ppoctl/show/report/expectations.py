"""Check of the recipe's `[expect]` table against the journal at the end of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppoctl.core.errors import ExpectationError
from ppoctl.core.step_metrics import of_step
from ppoctl.recipe.bounds import bounds_text, is_within
from ppoctl.store.journal import JournalLine
from ppoctl.store.run_paths import RunPaths

if TYPE_CHECKING:
    from ppoctl.recipe.schema import Expectation


@dataclass(frozen=True)
class ExpectationResult:
    """One row of the final table."""

    metric: str
    step: int | None
    """Step of the value that was checked; None: the metric never appeared."""
    first: float | None
    value: float | None
    bound: str
    met: bool


@dataclass(frozen=True)
class RunResult:
    """Result of a run whose last attempt ended without an error."""

    paths: RunPaths
    lines: list[JournalLine]
    results: list[ExpectationResult]
    early_end: str | None = None
    """Values that ended the run before its last step (`loop.early_end`); None: all steps are done."""


def history(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the journal lines as metric -> [(step, value)], sorted by step."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        if "step" in line:
            by_step.setdefault(int(line["step"]), []).append(line)
    series: dict[str, list[tuple[int, float]]] = {}
    for step, of_one in sorted(by_step.items()):
        for metric, value in of_step(of_one).items():
            series.setdefault(metric, []).append((step, float(value)))
    return series


def check_expectations(
    expect: "Mapping[str, Expectation]", lines: Iterable[Mapping[str, Any]]
) -> list[ExpectationResult]:
    """Return one result per expectation, in the recipe's order. An expectation is unmet if its metric never
    appeared."""
    series = history(lines)
    return [_check_one(metric, wanted, series.get(metric, [])) for metric, wanted in expect.items()]


def require_met(results: Iterable[ExpectationResult], *, longer: str | None = None) -> None:
    """Raise ExpectationError that names every unmet expectation. `longer` is the command that trains for more
    steps."""
    unmet = [result for result in results if not result.met]
    if unmet:
        parts = [
            f"`{v.metric}` is {'absent' if v.value is None else f'{v.value:.4g}'} (expected {v.bound})" for v in unmet
        ]
        raise ExpectationError(
            "the run does not meet the expectations of its recipe: " + "; ".join(parts),
            hint=longer,
        )


def _check_one(metric: str, wanted: "Expectation", points: list[tuple[int, float]]) -> ExpectationResult:
    bound = _bound_text(wanted)
    usable = [(s, v) for s, v in points if wanted.at_step is None or s == wanted.at_step]
    if not usable:
        return ExpectationResult(metric, None, None, None, bound, met=False)
    step, value = usable[-1]
    first = points[0][1]
    met = is_within(value, wanted.min, wanted.max) and (wanted.rise_min is None or value - first >= wanted.rise_min)
    return ExpectationResult(metric, step, first, value, bound, met)


def _bound_text(wanted: "Expectation") -> str:
    rise = "" if wanted.rise_min is None else f"a rise of {wanted.rise_min:g}"
    parts = filter(None, (bounds_text(wanted.min, wanted.max), rise))
    step = "" if wanted.at_step is None else f" at step {wanted.at_step}"
    return " and ".join(parts) + step
