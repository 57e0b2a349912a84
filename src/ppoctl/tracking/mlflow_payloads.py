"""Points, tags and params for MLflow, as a pure function of the run directory. Knows no MLflow client.

Each journal line becomes points on the axis of PPO steps. Every batch ends with one more point, `MARKER`, the number
of its last line: it is stored with the batch, so asking MLflow for it answers "what do you have?" exactly.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppoctl.metric_registry import reported

MARKER = "progress/journal_seq"
POINTS_PER_BATCH = 900
"""Most points in one batch. MLflow takes 1000 metrics in one transaction; a batch below that is stored whole or not
at all."""
LONGEST_VALUE = 5900
"""Most characters of a value. MLflow's limit for params is 6000, for tags 8000."""
LONGEST_KEY = 250
ABSENT = "absent"

STATUS: dict[str, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "unmet": "FAILED",
    "short": "FAILED",
    "failed": "FAILED",
    "stopped": "FAILED",
    "preempted": "KILLED",
    "interrupted": "KILLED",
}
"""MLflow's words for how an attempt stands; ours is kept beside them in the tag `ppoctl.status`. A run that a health
rule stopped, that ended short of its plan or without what its recipe expects has failed; one that was told to go away
was killed."""


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
    """Points of the lines; the marker is the last."""
    tags: dict[str, str]
    num_lines: int
    last_seq: int


@dataclass(frozen=True)
class Ending:
    """How a run stands, by its newest attempt."""

    word: str = "running"
    """The journal's word for it."""
    attempt: int | None = None
    """Number of the attempt; None: the journal has none."""
    at_ms: int | None = None
    """When it ended; None: it goes on."""
    contract: Mapping[str, str] = field(default_factory=dict)
    """Tags that say how `[expect]` is met; none while it cannot be judged."""

    @property
    def status(self) -> str:
        """MLflow's word; what it has no match for is a failure."""
        return STATUS.get(self.word, "FAILED")

    @property
    def tags(self) -> dict[str, str]:
        """Tags that say it in our words."""
        attempt = {} if self.attempt is None else {"ppoctl.attempt": str(self.attempt)}
        return {"ppoctl.status": self.word, **attempt, **self.contract}

    @property
    def is_judged(self) -> bool:
        """Whether all steps were done, so that the contract holds or does not."""
        return self.word in ("finished", "unmet")


def batches(lines: Iterable[Mapping[str, Any]], *, after: int) -> Iterator[JournalBatch]:
    """Batches of the lines numbered above `after`, in order, as few as MLflow's limit allows."""
    points: list[MetricPoint] = []
    tags: dict[str, str] = {}
    num_lines = 0
    marker: MetricPoint | None = None
    for line in lines:
        if line["seq"] <= after:
            continue
        found = points_of(line)
        if marker is not None and len(points) + len(found) > POINTS_PER_BATCH:
            yield JournalBatch((*points, marker), tags, num_lines, int(marker.value))
            points, tags, num_lines = [], {}, 0
        points.extend(found)
        tags.update(notes_of(line))
        num_lines += 1
        # Its step is its own number: MLflow calls the value with the highest step the latest, and journal lines
        # need not come in order of PPO steps.
        marker = MetricPoint(MARKER, float(line["seq"]), _milliseconds(line), line["seq"])
    if marker is not None:
        yield JournalBatch((*points, marker), tags, num_lines, int(marker.value))


def points_of(line: Mapping[str, Any]) -> list[MetricPoint]:
    """Points of a stage's figures and its seconds; an event has none. Values that are not finite are left out (see
    `notes_of`)."""
    at_ms = _milliseconds(line)
    return [
        MetricPoint(metric_name(name), float(value), at_ms, line["step"])
        for name, value in reported(line).items()
        if math.isfinite(value)
    ]


def notes_of(line: Mapping[str, Any]) -> dict[str, str]:
    """Tags for figures that are not finite: MLflow stores infinity as 1.8e308, which ruins the chart."""
    return {
        f"nonfinite/{metric_name(name)}": f"{value} at step {line['step']}"
        for name, value in reported(line).items()
        if not math.isfinite(value)
    }


def ending(lines: Iterable[Mapping[str, Any]]) -> Ending:
    """Status of the run by the last event of its newest attempt, whatever an earlier one that woke up late says after
    it."""
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
    """The recipe as flat MLflow params: `ppo.kl.coef` -> `0.001`. Lists are JSON; a value that is too long is cut and
    says so. Keys without a value, and empty tables, are no params."""
    flat: dict[str, str] = {}
    for path, value in _leaves(recipe, ()):
        text = value if isinstance(value, str) else json.dumps(value)
        flat[metric_name(".".join(path))] = _cut(text)
    return flat


def changed_params(recorded: Mapping[str, str], now: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """Tags for params that MLflow has with another value. MLflow refuses to change a param, so the param keeps what
    the run began with and the tag says what holds now, `absent` of a key that has no value any more; a value that is
    changed back keeps its tag."""
    return {
        name: value
        for key, value in {**dict.fromkeys(recorded, ABSENT), **now}.items()
        if (name := f"changed/{key}"[:LONGEST_KEY]) in tags or recorded.get(key, value) != value
    }


def metric_name(name: str) -> str:
    """The metric's name with the characters that MLflow refuses replaced by `_` (people name evaluation sets, and
    those names get here)."""
    allowed = re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII)
    parts = ["_" if part in ("", ".", "..") else part for part in allowed.split("/")]
    return "/".join(parts)[:LONGEST_KEY].rstrip("/")


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif value is not None:
        yield path, value


def _cut(text: str) -> str:
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[: LONGEST_VALUE - 60]}... ({len(text)} characters; see recipe.resolved.json)"


def _milliseconds(line: Mapping[str, Any]) -> int:
    return int(line["at"] * 1000)
