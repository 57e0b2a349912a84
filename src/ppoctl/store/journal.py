"""The journal: one line per committed artifact and per event, in order. It follows the manifests. Light.

Manifests are the truth; a line that a kill prevented is appended when its stage is recalled. A stage has one line, so
curves have no double points; one that was dropped and came out otherwise has another, and the later line counts.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ppoctl.batch.sealed_json import is_as_sealed, sealed_line, unseal, whole_lines
from ppoctl.store.append import GrowingFile, opened, read_whole
from ppoctl.store.attempt import Attempt
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RunPaths

JournalLine = dict[str, Any]

REPAIRED = "mended"
"""The event after journal or ledger lost lines to damage; states saved before it knew them longer."""


RECENT = 5
"""How many times of a stage say how long it takes."""

NEWEST = 100
"""Lines at the end of a journal that are read where only the newest count."""


def read_lines(path: Path) -> list[JournalLine]:
    """All whole lines; what a kill left of a last one is ignored. Raises CorruptArtifactError naming a damaged line,
    or the file where it is gone."""
    return [line.body for line in whole_lines(path, read_whole(path))]


@dataclass(frozen=True)
class JournalEvent:
    """Something that happened to a run and may show in its figures."""

    step: int
    """The step of the last stage before it; 0: none was committed yet."""
    what: str


def events(lines: Iterable[JournalLine]) -> list[JournalEvent]:
    """Where the run was resumed, and where a health rule stopped it, in order."""
    found: list[JournalEvent] = []
    step, has_stages = 0, False
    for line in lines:
        if "stage" in line:
            step, has_stages = int(line["step"]), True
        elif line.get("event") == "attempt_started" and has_stages:
            found.append(JournalEvent(step, "resumed"))
        elif line.get("event") == "attempt_ended" and line.get("status") == "stopped":
            found.append(JournalEvent(step, "health stop"))
    return found


def read_newest(path: Path) -> list[JournalLine]:
    """Every event, the newest lines, and the last evaluation: what a list of runs says, of a journal however long.
    Raises as `read_lines` does."""
    raws = read_whole(path).split(b"\n")[:-1]
    if not all(map(is_as_sealed, raws)):
        return read_lines(path)  # which names the line
    newest = len(raws) - NEWEST
    evaluation = max((number for number, raw in enumerate(raws) if b'"stage": "eval"' in raw), default=-1)
    kept = (n for n, raw in enumerate(raws) if n >= newest or n == evaluation or b'"event": ' in raw)
    return [unseal(raws[number].decode("ascii")) for number in kept]


class Journal:
    """Append-only writer of one run's journal. Only the newest attempt writes: others raise SupersededError.

    It is read once; later only what was appended since, so that a step costs the same however long the run is.
    """

    def __init__(self, paths: RunPaths, attempt: Attempt) -> None:
        self._path = paths.journal
        self._attempt = attempt
        self._lines: list[JournalLine] = []
        self._by_step: dict[int, list[JournalLine]] = {}
        """Lines of the stages of each step."""
        self._end = 0
        """Up to here the file has been read."""
        with opened(self._path) as file:
            self._catch_up(file)

    @property
    def seq(self) -> int:
        """Number of the last line."""
        return int(self._lines[-1]["seq"]) if self._lines else 0

    def ensure(self, manifest: Manifest) -> JournalLine | None:
        """Append the line of a committed stage unless its last one is the same; returns the line when it was new."""
        with opened(self._path) as file:
            self._catch_up(file)
            known = [line for line in self._by_step.get(manifest.step, ()) if line["stage"] == manifest.stage]
            if known and known[-1]["identity"] == manifest.identity:
                return None
            return self._append(file, stage_line(manifest))

    def event(self, name: str, **details: Any) -> JournalLine:
        """Append an event of this attempt."""
        with opened(self._path) as file:
            self._catch_up(file)
            body = {"event": name, "attempt": self._attempt.number, "at": time.time(), **details}
            return self._append(file, body)

    def lines(self) -> list[JournalLine]:
        """Every line so far, whoever appended it."""
        with opened(self._path) as file:
            self._catch_up(file)
        return list(self._lines)

    def metrics(self, step: int) -> dict[str, float]:
        """All figures of one step, over its stages; of a stage that was made again, the later ones."""
        merged: dict[str, float] = {}
        for line in self._by_step.get(step, ()):
            merged.update(line["figures"])
        return merged

    def history(self, *, up_to: int) -> list[tuple[int, dict[str, float]]]:
        """All figures of each step from 1 to `up_to` that has any, oldest first."""
        return [(step, self.metrics(step)) for step in sorted(self._by_step) if 0 < step <= up_to]

    def recent_s(self, stage: str) -> float | None:
        """The most seconds that the stage took in the last few steps that have it; None: no step has."""
        has_it = (line for line in reversed(self._lines) if line.get("stage") == stage)
        return max((float(line["seconds"]) for line in islice(has_it, RECENT)), default=None)

    def longest_s(self) -> float:
        """Seconds of the longest stage of the newest step; 0: there is none."""
        newest = self._by_step[max(self._by_step)] if self._by_step else []
        return max((float(line["seconds"]) for line in newest), default=0.0)

    def _catch_up(self, file: GrowingFile) -> None:
        """Read what was appended since; what a kill left of a last line is passed over."""
        if file.size == self._end:
            return
        data = file.read(start=self._end)
        for line in whole_lines(self._path, data, offset=self._end, line_number=len(self._lines) + 1):
            self._lines.append(line.body)
            if "stage" in line.body:
                self._by_step.setdefault(int(line.body["step"]), []).append(line.body)
            self._end = line.end

    def _append(self, file: GrowingFile, body: JournalLine) -> JournalLine:
        line = {"seq": self.seq + 1, **body}
        self._attempt.require_newest()
        file.truncate(self._end)
        file.append(sealed_line(line))
        self._catch_up(file)
        return line


def stage_line(manifest: Manifest) -> JournalLine:
    """The journal's line of one committed stage."""
    return {
        "step": manifest.step,
        "stage": manifest.stage,
        "at": manifest.committed_at,
        "seconds": manifest.seconds,
        "attempt": manifest.attempt,
        "identity": manifest.identity,
        "figures": manifest.figures,
        "clocked": manifest.extra.get("clocked", {}),
    }
