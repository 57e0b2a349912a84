"""The journal: one line per committed artifact and per event, in order. It follows the manifests. Light.

Manifests are the truth; a line that a kill prevented is appended at the next start or recall. Lines of a stage are
unique by (step, stage), so curves have no double points.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ppoctl.errors import StorageError
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt
from ppoctl.store.layout import STAGES, RunLayout
from ppoctl.store.manifest import Manifest

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """All whole lines; a torn last one is ignored."""
    if not path.is_file():
        return []
    lines: list[Line] = []
    for raw in path.read_bytes().split(b"\n")[:-1]:
        try:
            lines.append(json.loads(raw))
        except ValueError:
            break
    return lines


class Journal:
    """Append-only writer of one run's journal, shared safely by racing attempts."""

    def __init__(self, layout: RunLayout, attempt: Attempt) -> None:
        self._path = layout.journal
        self._layout = layout
        self._attempt = attempt
        self._known: set[tuple[int, str]] = set()
        self._reconcile()

    def ensure(self, manifest: Manifest) -> Line | None:
        """Append the line of a committed stage unless it is there; returns the line when it was new."""
        if (manifest.step, manifest.stage) in self._known:
            return None
        with self._locked() as file:
            line = self._append(file, stage_line(manifest))
        self._known.add((manifest.step, manifest.stage))
        return line

    def event(self, name: str, **details: Any) -> Line:
        """Append an event of this attempt. Written even when a newer attempt has started: it happened."""
        with self._locked() as file:
            body = {"event": name, "attempt": self._attempt.number, "at": time.time(), **details}
            return self._append(file, body)

    def lines(self) -> list[Line]:
        return read_lines(self._path)

    def figures(self, step: int) -> dict[str, float]:
        """All figures of one step, over its stages."""
        merged: dict[str, float] = {}
        for line in self.lines():
            if line.get("step") == step and "figures" in line:
                merged.update(line["figures"])
        return merged

    def _reconcile(self) -> None:
        """Drop a torn last line, then append what committed manifests lack."""
        with self._locked() as file:
            lines = read_lines(self._path)
            file.seek(0)
            whole = sum(len(part) + 1 for part in file.read().split(b"\n")[: len(lines)])
            file.truncate(whole)
            self._known = {(line["step"], line["stage"]) for line in lines if "stage" in line}
        for step in self._layout.committed_steps():
            for stage in STAGES:
                manifest = manifests.read(self._layout.stage(step, stage))
                if manifest is not None:
                    self.ensure(manifest)

    def _append(self, file: IO[bytes], body: Line) -> Line:
        line = {"seq": _last_seq(file) + 1, **body}
        end = file.seek(0, os.SEEK_END)
        try:
            file.write(json.dumps(line, sort_keys=True).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            # A full disk may have taken half a line; the next one must not be glued to it.
            with suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise
        return line

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        try:
            with self._path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
        except OSError as error:
            raise StorageError(
                f"cannot write `{self._path}`: {error.strerror}",
                hint=f"free space or rights are missing: df -h {self._path.parent}",
            ) from error


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
    }


def _last_seq(file: IO[bytes]) -> int:
    """`seq` of the last whole line; 0 when there is none. Reads the tail only."""
    end = file.seek(0, os.SEEK_END)
    size = min(end, 1 << 16)
    file.seek(end - size)
    tail = file.read(size).rstrip(b"\n").rsplit(b"\n", 1)[-1]
    if not tail:
        return 0
    return int(json.loads(tail)["seq"])
