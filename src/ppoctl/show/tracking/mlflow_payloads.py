"""Points, tags, params and tables of samples for MLflow, as pure functions of the run directory. Uses no MLflow
client.

Each stage becomes points on the axis of steps. The lines of all rounds of a step become points together: MLflow has
one point of each metric for each step. Every batch ends with one more point, `MARKER`: the number of the batch's
last line. MLflow stores the marker together with the batch, so the marker shows exactly which lines MLflow has.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ppoctl.core.step_metrics import StageLine, of_step

MARKER = "progress/journal_seq"
POINTS_PER_BATCH = 900
"""Largest number of points in a batch. MLflow accepts 1000 metrics in one transaction, so a batch of this
size is stored completely or not at all."""
LONGEST_VALUE = 5900
"""Largest number of characters of a value. MLflow's limit is 6000 for params and 8000 for tags."""
LONGEST_KEY = 250  # MLflow's limit for names
ABSENT = "absent"

STATUS: dict[str, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "unmet": "FINISHED",
    "preempted": "KILLED",
    "interrupted": "KILLED",
}
"""MLflow's status for each status of an attempt; FAILED for all others. The tag `ppoctl.status` has the status of
the attempt.

A run is FAILED if a health rule stopped it, or if it ended before its last step. It is KILLED if a signal or a user
stopped it. A run that did not meet `[expect]` has finished all steps: the tag `ppoctl.contract` has the result.
"""


TABLES_TAG = "mlflow.loggedArtifacts"
"""Tag that makes MLflow's pages show tables."""
ROWS_PER_TABLE = 64
"""Number of an evaluation's samples that MLflow shows; the run directory has all of them."""
MOST_TABLES = 120
"""Number of newest tables in the tag. A table takes about 55 of the 8000 characters of an MLflow tag."""
MOST_OF_TRAINING = 40
"""Largest number of training tables among these, so that training tables do not displace evaluations."""
_TRAINING = "samples/train-"

_FIRST = ("set", "mode", "prompt", "response", "conversation", "score", "given", "answer", "outcome")
"""First columns of a table, by which a reader compares rows; all other columns come after them."""


@dataclass(frozen=True)
class MetricPoint:
    """One value of one metric."""

    name: str
    value: float
    at_ms: int
    step: int


@dataclass(frozen=True)
class JournalBatch:
    """Consecutive journal lines, ready to send."""

    points: tuple[MetricPoint, ...]
    """Points of the lines; the marker is the last point."""
    tags: dict[str, str]
    num_lines: int
    last_seq: int


@dataclass(frozen=True)
class Ending:
    """Status of a run, from its newest attempt."""

    word: str = "running"
    """Status in the journal."""
    attempt: int | None = None
    """Number of the attempt; None: the journal has no attempt."""
    at_ms: int | None = None
    """Time of the end, in unix milliseconds; None: the attempt is running."""
    contract: Mapping[str, str] = field(default_factory=dict)
    """Tags with the result of `[expect]`; empty before the last step is done."""

    @property
    def status(self) -> str:
        """MLflow's status."""
        return STATUS.get(self.word, "FAILED")

    @property
    def tags(self) -> dict[str, str]:
        """Tags with the status and attempt of ppoctl."""
        attempt = {} if self.attempt is None else {"ppoctl.attempt": str(self.attempt)}
        return {"ppoctl.status": self.word, **attempt, **self.contract}

    @property
    def is_judged(self) -> bool:
        """Whether all steps are done, so that `[expect]` has a result."""
        return self.word in ("finished", "unmet")


def batches(parts: Iterable[Sequence[StageLine]], *, after: int) -> Iterator[JournalBatch]:
    """Yield batches of the parts whose last line is numbered above `after`, as few as MLflow's limit allows.

    A part is one line, or the lines of all rounds of a step. Parts are in the order of the journal.
    """
    points: list[MetricPoint] = []
    tags: dict[str, str] = {}
    num_lines = 0
    marker: MetricPoint | None = None
    for part in parts:
        last = part[-1]
        if last["seq"] <= after:
            continue
        part_points = points_of(part)
        if marker is not None and len(points) + len(part_points) > POINTS_PER_BATCH:
            yield JournalBatch((*points, marker), tags, num_lines, int(marker.value))
            points, tags, num_lines = [], {}, 0
        points.extend(part_points)
        tags.update(notes_of(part))
        num_lines += sum(line["seq"] > after for line in part)
        # The marker's step is the line number, not the PPO step: MLflow considers the value with the highest step as
        # the latest, and journal lines are not always in order of PPO steps.
        marker = MetricPoint(MARKER, float(last["seq"]), _milliseconds(last), last["seq"])
    if marker is not None:
        yield JournalBatch((*points, marker), tags, num_lines, int(marker.value))


def points_of(part: Sequence[StageLine]) -> list[MetricPoint]:
    """Return the points of the metrics and seconds of a stage or of all rounds of a step. A save is the only event
    with a point. A save of the step before may be among the rounds.

    Values that are not finite are omitted (see `notes_of`).
    """
    at_ms, steps = _milliseconds(part[-1]), dict.fromkeys(line["step"] for line in part if "step" in line)
    return [
        MetricPoint(metric_name(name), float(value), at_ms, step)
        for step in steps
        for name, value in of_step(line for line in part if line.get("step") == step).items()
        if math.isfinite(value)
    ]


def notes_of(part: Sequence[StageLine]) -> dict[str, str]:
    """Return tags for metrics that are not finite: MLflow stores infinity as 1.8e308, which ruins the chart."""
    return {
        f"nonfinite/{metric_name(name)}": f"{value} at step {part[0]['step']}"
        for name, value in of_step(part).items()
        if not math.isfinite(value)
    }


def ending(lines: Iterable[Mapping[str, Any]]) -> Ending:
    """Return the status of the run, from the last event of its newest attempt.

    An earlier attempt that was suspended may write events later. They are ignored.
    """
    newest = Ending()
    for line in lines:
        if line.get("event") in ("attempt_started", "attempt_ended") and line["attempt"] >= (newest.attempt or 0):
            has_ended = line["event"] == "attempt_ended"
            newest = (
                Ending(line["status"], line["attempt"], _milliseconds(line))
                if has_ended
                else Ending(attempt=line["attempt"])
            )
    return newest


def params(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the recipe as flat MLflow params: `ppo.kl.coef` -> `0.001`.

    Lists are JSON. A value that is too long is shortened and ends with a note. Keys without a value and empty tables
    are omitted.
    """
    flat: dict[str, str] = {}
    for path, value in _leaves(recipe, ()):
        text = value if isinstance(value, str) else json.dumps(value)
        flat[metric_name(".".join(path))] = _shortened(text)
    return flat


def changed_params(recorded: Mapping[str, str], now: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags for params that MLflow has with another value.

    MLflow does not change a param. So the param keeps the first value of the run, and the tag has the present value,
    or `absent` if the key has no value. A value that is changed back keeps its tag.
    """
    return {
        name: value
        for key, value in {**dict.fromkeys(recorded, ABSENT), **now}.items()
        if (name := f"changed/{key}"[:LONGEST_KEY]) in tags or recorded.get(key, value) != value
    }


def metric_name(name: str) -> str:
    """Return the metric's name with `_` for each character that MLflow does not allow.

    A name contains the name of an evaluation set, which may have any character.
    """
    allowed = re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII)
    # MLflow rejects a name that `posixpath.normpath` would change.
    parts = ["_" if part in ("", ".", "..") else part for part in allowed.split("/")]
    return "/".join(parts)[:LONGEST_KEY].rstrip("/")


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif value is not None:
        yield path, value


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[: LONGEST_VALUE - 60]}... ({len(text)} characters; see recipe.resolved.json)"


def _milliseconds(line: Mapping[str, Any]) -> int:
    return int(line["at"] * 1000)


def table_name(step: int) -> str:
    """Return the path of the table of the evaluation after this step.

    The path is the same for all runs, so that MLflow can compare their tables.
    """
    return f"samples/step-{step:06d}.json"


def training_table_name(step: int) -> str:
    """Return the path of the table of this step's training samples."""
    return f"{_TRAINING}{step:06d}.json"


def training_table(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return rows, which have equal columns, in the format of `MlflowClient.log_table`; None if there are no rows."""
    if not rows:
        return None
    cells = [dict(_cells("", row)) for row in rows]
    return json.dumps({"columns": list(cells[0]), "data": [list(row.values()) for row in cells]})


def table(lines: Iterable[str]) -> str:
    """Return the first rows of `samples.jsonl` in the format of `MlflowClient.log_table`.

    The result is a complete table; `log_table` itself would append to an existing one. Nested values (`extras`)
    become separate columns. A damaged line is omitted.
    """
    rows = [dict(_cells("", row)) for line in islice(lines, ROWS_PER_TABLE) for row in _read(line)]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [*(name for name in _FIRST if name in names), *(name for name in names if name not in _FIRST)]
    return json.dumps({"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]})


def with_tables(tag: str | None, names: Sequence[str]) -> str:
    """Return the tag with these tables added; tables that others added remain."""
    existing = json.loads(tag) if tag else []
    entries = [*existing, *(entry for name in names if (entry := {"path": name, "type": "table"}) not in existing)]
    of_training = [entry for entry in entries if str(entry.get("path")).startswith(_TRAINING)]
    kept = [entry for entry in entries if entry not in of_training[:-MOST_OF_TRAINING]]
    return json.dumps(kept[-MOST_TABLES:])


def _read(line: str) -> Iterable[dict[str, Any]]:
    with suppress(ValueError):
        yield json.loads(line)


def _cells(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _cells(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list):
        yield name, json.dumps(value)
    else:
        # JSON has no value for NaN and infinity, and browsers reject Python's notation.
        yield name, None if isinstance(value, float) and not math.isfinite(value) else value
