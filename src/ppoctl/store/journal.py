"""The journal: one line per committed artifact and per event, in order. It follows the manifests. Light.

Manifests are the truth; a line that a kill prevented is appended at the next start or recall. A stage has one line,
so curves have no double points; one that was dropped and came out otherwise has another, and the later line counts.
"""

import json
import time
from pathlib import Path
from typing import Any

from ppoctl.store import manifest as manifests
from ppoctl.store.append import LockedFile, locked
from ppoctl.store.attempt import Attempt
from ppoctl.store.layout import STAGES, RunLayout
from ppoctl.store.manifest import Manifest

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """All whole lines; a torn last one is ignored."""
    return _parse(path.read_bytes()) if path.is_file() else []


class Journal:
    """Append-only writer of one run's journal, shared safely by racing attempts."""

    def __init__(self, layout: RunLayout, attempt: Attempt) -> None:
        self._path = layout.journal
        self._layout = layout
        self._attempt = attempt
        self._known: dict[tuple[int, str], str] = {}
        """Identity of each stage as its last line has it."""
        self._seq = 0
        self._end = 0
        """Up to here the file has been read."""
        self._reconcile()

    def ensure(self, manifest: Manifest) -> Line | None:
        """Append the line of a committed stage unless its last one is the same; returns the line when it was new."""
        with locked(self._path) as file:
            self._catch_up(file)
            if self._known.get((manifest.step, manifest.stage)) == manifest.identity:
                return None
            return self._append(file, stage_line(manifest))

    def event(self, name: str, **details: Any) -> Line:
        """Append an event of this attempt. Written even when a newer attempt has started: it happened."""
        with locked(self._path) as file:
            self._catch_up(file)
            body = {"event": name, "attempt": self._attempt.number, "at": time.time(), **details}
            return self._append(file, body)

    def lines(self) -> list[Line]:
        return read_lines(self._path)

    def figures(self, step: int) -> dict[str, float]:
        """All figures of one step, over its stages; of a stage that was made again, the later ones."""
        merged: dict[str, float] = {}
        for line in self.lines():
            if line.get("step") == step and "figures" in line:
                merged.update(line["figures"])
        return merged

    def _reconcile(self) -> None:
        """Append what committed manifests lack."""
        for step in self._layout.committed_steps():
            for stage in STAGES:
                manifest = manifests.read(self._layout.stage(step, stage))
                if manifest is not None:
                    self.ensure(manifest)

    def _catch_up(self, file: LockedFile) -> None:
        """Read what this and other attempts have appended since; drop a torn last line."""
        if file.size == self._end:
            return
        data = file.read(start=self._end)
        for line in _parse(data):
            self._seq = int(line["seq"])
            if "stage" in line:
                self._known[line["step"], line["stage"]] = line["identity"]
        self._end += _whole(data)
        file.truncate(self._end)

    def _append(self, file: LockedFile, body: Line) -> Line:
        line = {"seq": self._seq + 1, **body}
        file.append(json.dumps(line, sort_keys=True).encode("ascii") + b"\n")
        self._catch_up(file)
        return line


def stage_line(manifest: Manifest) -> Line:
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


def _parse(data: bytes) -> list[Line]:
    """The whole lines at the beginning of `data`."""
    lines: list[Line] = []
    for raw in data.split(b"\n")[:-1]:
        try:
            lines.append(dict(json.loads(raw)))
        except (ValueError, TypeError):
            break
    return lines


def _whole(data: bytes) -> int:
    """Bytes of these lines."""
    return sum(len(raw) + 1 for raw in data.split(b"\n")[: len(_parse(data))])
