"""Table of the stages of a step, and of the saves after it: seconds, waits, speed and memory. Imports no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ppoctl.core import metric_registry

HEADERS = {
    "seconds": "seconds",
    "wait_s": "waiting",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "peak_gib": "peak GiB",
}
"""Column -> its header. `metric_registry.stage_metrics` has the same columns."""


@dataclass(frozen=True)
class StageRow:
    """One row. A value is None if the stage does not have it."""

    name: str
    seconds: float
    wait_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None


def stage_rows(stages: Iterable[str], roles: Iterable[str], metrics: Mapping[str, float]) -> list[StageRow]:
    """Return the rows of these stages, each followed by its transfer of weights, and of the saves of these roles.
    `metrics` are those of a step, or their medians. A stage or a role without seconds has no row."""
    rows: list[StageRow] = []
    rollouts = metric_registry.ROLLOUTS_S
    # The stages of a step that generate have metrics of the same names, which are those of the last of them.
    generated = next((name for name in reversed(rollouts) if name in metrics), "")
    for stage in stages:
        names = metric_registry.stage_metrics(stage)
        seconds = names["seconds"]
        if seconds not in metrics:
            continue
        if seconds in rollouts and seconds != generated:
            rows.append(StageRow(stage, metrics[seconds]))
            continue
        rows.append(StageRow(stage, **{column: metrics.get(name) for column, name in names.items()}))  # type: ignore[arg-type]
        transfer_s = metrics.get(metric_registry.TIME_TRANSFER_S.name, 0.0)
        if transfer_s > 0 and seconds == generated:
            rows.append(StageRow(f"{stage}: weight transfer", transfer_s))
    saves = {role: metrics.get(metric_registry.save_metric(role)) for role in roles}
    return rows + [StageRow(f"save of the {role}", seconds) for role, seconds in saves.items() if seconds is not None]


def table(rows: Sequence[StageRow]) -> tuple[list[str], list[list[str | float]]]:
    """Return headers and cells, without columns that have no value above 0."""
    columns = [column for column in HEADERS if column == "seconds" or any(getattr(row, column) for row in rows)]
    cells = [[row.name, *(_short(getattr(row, column)) for column in columns)] for row in rows]
    return [HEADERS[column] for column in columns], cells


def _short(value: float | None) -> str | float:
    """Return the value with three digits, or as a whole number above 1000."""
    return "" if value is None else round(value) if value >= 1000 else float(f"{value:.3g}")
