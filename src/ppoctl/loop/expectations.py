"""The recipe's contract: what the run must reach, judged on the journal when it ends."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppoctl.errors import ExpectationError
from ppoctl.metric_registry import reported
from ppoctl.store.journal import JournalLine
from ppoctl.store.run_paths import RunPaths

if TYPE_CHECKING:
    from ppoctl.recipe.schema import Expectation


@dataclass(frozen=True)
class ExpectationResult:
    """One line of the final table."""

    metric: str
    step: int | None
    """Where it was read; None: the metric never appeared."""
    first: float | None
    value: float | None
    bound: str
    met: bool


@dataclass(frozen=True)
class RunResult:
    """How a run stands after an attempt that ended in order."""

    paths: RunPaths
    lines: list[JournalLine]
    verdicts: list[ExpectationResult]


def history(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Journal lines as metric -> [(step, value)], by step."""
    series: dict[str, dict[int, float]] = {}
    for line in lines:
        for metric, value in reported(line).items():
            series.setdefault(metric, {})[int(line["step"])] = float(value)
    return {metric: sorted(points.items()) for metric, points in series.items()}


def check_expectations(
    expect: "Mapping[str, Expectation]", lines: Iterable[Mapping[str, Any]]
) -> list[ExpectationResult]:
    """One verdict per expectation, in the recipe's order. A metric that never appeared is unmet."""
    series = history(lines)
    return [_judge_one(metric, wanted, series.get(metric, [])) for metric, wanted in expect.items()]


def require_met(verdicts: Iterable[ExpectationResult], *, longer: str | None = None) -> None:
    """Raise ExpectationError naming every unmet expectation; `longer` is the command that trains on."""
    unmet = [verdict for verdict in verdicts if not verdict.met]
    if unmet:
        parts = [
            f"`{v.metric}` is {'absent' if v.value is None else f'{v.value:.4g}'} (expected {v.bound})" for v in unmet
        ]
        raise ExpectationError(
            "the run ended without what its recipe expects: " + "; ".join(parts),
            hint=longer,
        )


def _judge_one(metric: str, wanted: "Expectation", points: list[tuple[int, float]]) -> ExpectationResult:
    bound = _bound_text(wanted)
    usable = [(s, v) for s, v in points if wanted.at_step is None or s == wanted.at_step]
    if not usable:
        return ExpectationResult(metric, None, None, None, bound, met=False)
    step, value = usable[-1]
    first = points[0][1]
    met = (
        (wanted.min is None or value >= wanted.min)
        and (wanted.max is None or value <= wanted.max)
        and (wanted.rise_min is None or value - first >= wanted.rise_min)
    )
    return ExpectationResult(metric, step, first, value, bound, met)


def _bound_text(wanted: "Expectation") -> str:
    parts = []
    if wanted.min is not None:
        parts.append(f"at least {wanted.min:g}")
    if wanted.max is not None:
        parts.append(f"at most {wanted.max:g}")
    if wanted.rise_min is not None:
        parts.append(f"a rise of {wanted.rise_min:g}")
    where = "" if wanted.at_step is None else f" at step {wanted.at_step}"
    return " and ".join(parts) + where
