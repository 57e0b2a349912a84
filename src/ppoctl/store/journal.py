"""The journal: one line for each committed artifact and each event, in order. Imports no torch.

The journal is derived from the manifests: if a kill prevented a line, the line is appended when its stage is reused.
A stage has one line, so curves have one point per step. A stage that was dropped and then had another result has a
second line, and the later line is valid.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ppoctl.core.batch.sealed_json import is_as_sealed, sealed_line, unseal, whole_lines
from ppoctl.core.step_metrics import SAVED
from ppoctl.store.append import GrowingFile, opened, read_whole
from ppoctl.store.attempt import Attempt
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RunPaths

JournalLine = dict[str, Any]

REPAIRED = "mended"
"""Event that is appended after damaged lines of the journal or the ledger were dropped. States that were saved before
this event recorded longer files."""


BEGAN_AT = "began_at"
"""Field in the `extra` of the manifest, and in the line, of a stage that ran beside others."""

RECENT = 5
"""Number of last runs of a stage from which its duration is estimated."""

_OF_SAVE = f'"event": "{SAVED}"'.encode()
NEWEST = 100
"""Number of lines at the end of a journal that `read_newest` reads."""


def read_lines(path: Path) -> list[JournalLine]:
    """Return all complete lines; a last line that a kill cut short is ignored.

    Raises CorruptArtifactError naming a damaged line, or the file if it is missing.
    """
    return [line.body for line in whole_lines(path, read_whole(path))]


class JournalTail:
    """Reads a journal from its beginning, and later the lines that were added. Any process may do this."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        """Number of bytes of the journal that have been read."""

    def new_lines(self) -> Iterator[JournalLine]:
        """Yield the complete lines that were added since the last call.

        A last line that a kill cut short is not read. Raises CorruptArtifactError naming a damaged line.
        """
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        for line in whole_lines(self._path, data, offset=self._offset):
            self._offset = line.end
            yield line.body


@dataclass(frozen=True)
class JournalEvent:
    """An event of a run that may be visible in its metrics."""

    step: int
    """Step of the last stage before the event; 0: no stage was committed yet."""
    what: str


def events(lines: Iterable[JournalLine]) -> list[JournalEvent]:
    """Return the resumes of a run and the stops by a health rule, in order."""
    run_events: list[JournalEvent] = []
    step, has_stages = 0, False
    for line in lines:
        if "stage" in line:
            step, has_stages = int(line["step"]), True
        elif line.get("event") == "attempt_started" and has_stages:
            run_events.append(JournalEvent(step, "resumed"))
        elif line.get("event") == "attempt_ended" and line.get("status") == "stopped":
            run_events.append(JournalEvent(step, "health stop"))
    return run_events


def read_newest(path: Path) -> list[JournalLine]:
    """Return every event except saves, the newest lines and the line of the last evaluation. A list of runs shows
    these lines.

    The time of a call hardly depends on the length of the journal. Raises the same errors as `read_lines`.
    """
    raws = read_whole(path).split(b"\n")[:-1]
    if not all(map(is_as_sealed, raws)):
        return read_lines(path)  # raises the error that names the damaged line
    newest = len(raws) - NEWEST
    evaluation = max((number for number, raw in enumerate(raws) if b'"stage": "eval"' in raw), default=-1)
    is_event = [b'"event": ' in raw and _OF_SAVE not in raw for raw in raws]
    kept = (n for n in range(len(raws)) if n >= newest or n == evaluation or is_event[n])
    return [unseal(raws[number].decode("ascii")) for number in kept]


class Journal:
    """Append-only writer of a run's journal. Only the newest attempt can write; others raise SupersededError.

    The file is read once and then only from the last known line on, so that the time of a step does not grow with the
    length of the run.
    """

    def __init__(self, paths: RunPaths, attempt: Attempt) -> None:
        self._path = paths.journal
        self._attempt = attempt
        self._lines: list[JournalLine] = []
        self._by_step: dict[int, list[JournalLine]] = {}
        """Lines of the stages of each step."""
        self._end = 0
        """Offset up to which the file has been read."""
        with opened(self._path) as file:
            self._catch_up(file)

    @property
    def seq(self) -> int:
        """Number of the last line."""
        return int(self._lines[-1]["seq"]) if self._lines else 0

    def ensure(self, manifest: Manifest) -> JournalLine | None:
        """Append the line of a committed stage unless the last line of the stage has the same result.

        Returns the appended line, or None if the line existed.
        """
        with opened(self._path) as file:
            self._catch_up(file)
            known = [line for line in self._by_step.get(manifest.step, ()) if line["stage"] == manifest.stage]
            if known and known[-1]["identity"] == manifest.identity:
                return None
            return self._append(file, stage_line(manifest, self._by_step.get(manifest.step, ())))

    def event(self, name: str, **details: Any) -> JournalLine:
        """Append an event of this attempt and return its line."""
        with opened(self._path) as file:
            self._catch_up(file)
            body = {"event": name, "attempt": self._attempt.number, "at": time.time(), **details}
            return self._append(file, body)

    def lines(self) -> list[JournalLine]:
        """Return every line so far, including lines of other attempts."""
        with opened(self._path) as file:
            self._catch_up(file)
        return list(self._lines)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of all stages of a step. Later values replace those of an earlier run of a stage."""
        merged: dict[str, float] = {}
        for line in self._by_step.get(step, ()):
            merged.update(line["figures"])
        return merged

    def history(self, *, up_to: int) -> list[tuple[int, dict[str, float]]]:
        """Return (step, metrics) for each step from 1 to `up_to` that has metrics, oldest first."""
        return [(step, self.metrics(step)) for step in sorted(self._by_step) if 0 < step <= up_to]

    def recent_s(self, stage: str) -> float | None:
        """Return the seconds of the longest of a stage's last `RECENT` runs; None: the stage has not run."""
        has_it = (line for line in reversed(self._lines) if line.get("stage") == stage)
        return max((float(line["seconds"]) for line in islice(has_it, RECENT)), default=None)

    def longest_s(self) -> float:
        """Return the seconds of the longest stage of the newest step; 0: no stage was committed."""
        newest = self._by_step[max(self._by_step)] if self._by_step else []
        return max((float(line["seconds"]) for line in newest), default=0.0)

    def _catch_up(self, file: GrowingFile) -> None:
        """Read the lines that were appended since the last call; a last line that a kill cut short is ignored."""
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
        # A kill may have cut short the last line. The new line must not be appended to it.
        file.truncate(self._end)
        file.append(sealed_line(line))
        self._catch_up(file)
        return line


def stage_line(manifest: Manifest, of_the_step: Iterable[JournalLine]) -> JournalLine:
    """Return the journal line of a committed stage.

    `of_the_step` are the lines of the step so far. If the stage has several rounds, the line of a later round also
    has `rounds_s`, the seconds of all rounds so far. If the stage ran beside others, the line has `began_at`, when
    its work began.
    """
    name, _, number = manifest.stage.partition(".")
    rounds = {line["stage"]: line["seconds"] for line in of_the_step if line["stage"].partition(".")[0] == name}
    earlier = [name, *(f"{name}.{each}" for each in range(2, int(number)))] if number else []
    rounds_s = {"rounds_s": manifest.seconds + sum(rounds.get(each, 0.0) for each in earlier)} if number else {}
    return {
        "step": manifest.step,
        "stage": manifest.stage,
        "at": manifest.committed_at,
        "seconds": manifest.seconds,
        "attempt": manifest.attempt,
        "identity": manifest.identity,
        "figures": manifest.figures,
        "clocked": manifest.extra.get("clocked", {}),
        **rounds_s,
        **{name: value for name, value in manifest.extra.items() if name == BEGAN_AT},
    }
