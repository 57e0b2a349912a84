"""The metrics of a run as an event file for TensorBoard. Only this file imports tensorboard, and only when it writes.

    journal -> of_step -> EventFile -> RUN/tensorboard/events.out.tfevents.ppoctl

The content of the file is a function of the journal: one record for each step that has ended, one for each
evaluation, and one for each save. A running attempt, a later attempt and `ppoctl track` therefore write the same
bytes, in any order, and a resume only appends to the file. If a resume repeats steps with another result, their
records differ, and all bytes are written again.

The training thread writes it, after a step: this takes about a millisecond, on the disk to which the same thread
writes the journal. TensorBoard stores values in single precision.
"""

import io
from collections.abc import Callable
from typing import Any

from ppoctl.core.errors import quoted
from ppoctl.core.step_metrics import SAVED, of_step
from ppoctl.show.tracking.forwarder import DONE
from ppoctl.show.tracking.mlflow_problems import reason
from ppoctl.store.disk_errors import storage_error
from ppoctl.store.journal import JournalLine, JournalTail
from ppoctl.store.outline import EVAL
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

Part = tuple[int, str]
"""A step, and what of it: `""`, its stages; `eval`, the evaluation after it; or the role whose save it is."""


class EventFile:
    """The event file of a run, and the position in the journal up to which it was read."""

    def __init__(self, paths: RunPaths) -> None:
        run = RecordedRun(paths)
        self.path = paths.tensorboard / "events.out.tfevents.ppoctl"
        self._created = float(run.facts["created"])
        self._outlines = run.outlines
        self._journal = JournalTail(paths.journal)
        self._lines: dict[Part, list[JournalLine]] = {}
        self._running: set[Part] = set()
        """Parts whose last stage is not in the journal, or with a line after it."""
        self._records: dict[Part, bytes] = {}
        self._num_values: dict[Part, int] = {}
        self._has_changed = False
        """Whether a record was made that the file does not have."""

    @property
    def num_values(self) -> int:
        """Number of values in the file."""
        return sum(self._num_values.values())

    def update(self) -> None:
        """Write the steps that have ended since the last call, if any. Raises OSError if the file cannot be written;
        a later call tries again."""
        for line in self._journal.new_lines():
            self._add(line)
        if self._has_changed:
            header = _record(wall_time=self._created, file_version="brain.Event:2")
            self._store(b"".join((header, *self._records.values())))
            self._has_changed = False

    def _add(self, line: JournalLine) -> None:
        if "stage" in line:
            part = (int(line["step"]), EVAL if line["stage"] == EVAL else "")
            self._lines.setdefault(part, []).append(line)
            self._running.add(part)
            # A generation may be committed after the last stage of its step.
            if part[1] or part in self._records or line["stage"] == self._outlines.at(part[0]).last:
                self._encode(part)
        elif line.get("event") == SAVED:
            part = (int(line["step"]), line["role"])
            self._lines[part] = [line]
            self._running.add(part)
            self._encode(part)
        elif line.get("status") in DONE:  # also of a command that only generates
            for part in sorted(self._running):
                self._encode(part)

    def _encode(self, part: Part) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        lines = self._lines[part]
        values = [Summary.Value(tag=name, simple_value=value) for name, value in of_step(lines).items()]
        self._records[part] = _record(wall_time=lines[-1]["at"], step=part[0], summary=Summary(value=values))
        self._num_values[part] = len(values)
        self._running.remove(part)
        self._has_changed = True

    def _store(self, content: bytes) -> None:
        """Make the file begin with `content`. Bytes that it has are not written again: TensorBoard may have read them
        and continues after them. A record that a kill cut short is completed."""
        self.path.parent.mkdir(exist_ok=True)
        self.path.touch()
        with self.path.open("r+b") as file:
            existing = file.read()
            if not existing.startswith(content):
                file.seek(len(existing) if content.startswith(existing) else 0)
                file.truncate()
                file.write(content[file.tell() :])


def _record(**fields: Any) -> bytes:
    """Return an event as it is in a file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(**fields).SerializeToString())
    return buffer.getvalue()


class TensorBoardMirror:
    """Event file of a running attempt. Its failures do not reach the run; the first one is reported in one line."""

    def __init__(self, paths: RunPaths, notify: Callable[[str], None]) -> None:
        self._paths = paths
        self._notify = notify
        self._file: EventFile | None = None
        self._has_failed = False

    def update(self) -> None:
        """Write the steps that have ended. After a failure, each call tries again."""
        try:
            self._file = self._file or EventFile(self._paths)
            self._file.update()
        except Exception as problem:  # noqa: BLE001 - no failure of a mirror may reach training
            if not self._has_failed:
                self._notify(
                    f"tensorboard: cannot write `{self._paths.tensorboard}` ({reason(problem)}); training continues, "
                    f"and this writes what is missing: ppoctl track {quoted(self._paths.root)}"
                )
            self._has_failed = True


def write_event_file(paths: RunPaths) -> int:
    """Write the event file of a run, and return the number of its values. Raises StorageError if it cannot be
    written."""
    file = EventFile(paths)
    try:
        file.update()
    except OSError as problem:
        raise storage_error(file.path, problem) from problem
    return file.num_values
