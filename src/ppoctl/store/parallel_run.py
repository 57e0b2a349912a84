"""A stage that runs in a thread of its own, while the main thread runs the stages after it.

    main thread:  begin --> other stages --> finish: wait, commit
    thread:             --> generate, keep finished samples -->

Only the main thread uses trainers, commits records and writes the journal. The thread uses the engines, and writes
the finished samples of its stage.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from ppoctl.core.batch.records import Record
from ppoctl.core.clock import WORK
from ppoctl.core.measured import MEASUREMENTS, Measured
from ppoctl.core.ports import Gate, OnProgress

THREAD = "generation"
"""Name of the thread."""
_LOOK_EVERY_S = 0.1
"""Interval in which the waiting main thread looks for a stop and reports progress, in seconds."""
CANCEL_LIMIT_S = 10.0
"""Seconds that a cancelled thread may take to write its finished samples: it asks its gate after each reply of an
engine."""


class _CancelledError(Exception):
    """The thread stops, because the step ended early."""


class _CancelGate:
    """Gate of the thread: it closes when the run is cancelled."""

    def __init__(self) -> None:
        self.is_closed = False

    def before(self, step: int, stage: str) -> None:  # noqa: ARG002 - a port
        self.between()

    def between(self) -> None:
        if self.is_closed:
            raise _CancelledError

    def may_save(self) -> bool:
        return True


class ParallelRun:
    """A running stage. The caller calls `finish` or `cancel`."""

    def __init__(
        self,
        work: Callable[[Gate, OnProgress], Record[Any]],
        commit: Callable[[Record[Any], Measured, float], None],
        wait: Callable[[], Gate],
        on_progress: OnProgress,
    ) -> None:
        """`commit` receives the record, what the thread measured, and the seconds that `finish` waited. `wait` is
        called when the wait begins, and returns the gate that may end the wait."""
        self._work, self._commit, self._wait, self._on_progress = work, commit, wait, on_progress
        self._gate = _CancelGate()
        self._record: Record[Any] | None = None
        self._measured = Measured()
        self._error: BaseException | None = None
        self._progress: tuple[int, int, int] | None = None
        self._tokens = 0
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._record = self._work(self._gate, self._note)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._error = error
        finally:
            self._measured, self._seconds = MEASUREMENTS.take(), time.monotonic() - began

    def _note(self, done: int, total: int, tokens: int) -> None:
        self._progress, self._tokens = (done, total, tokens), tokens

    def finish(self) -> Record[Any]:
        """Wait for the stage, commit its record, and return it. Raises the error of the stage, or that of the
        gate."""
        began, gate = WORK.now(), self._wait()
        while self._thread.is_alive():
            gate.between()
            if self._progress is not None:
                self._on_progress(*self._progress)
                self._progress = None
            self._thread.join(_LOOK_EVERY_S)
        self.raise_error()
        assert self._record is not None, "the thread ended with a record or an error"
        self._commit(self._record, self._measured, WORK.now() - began)
        return self._record

    def raise_error(self) -> None:
        """Raise the error that ended the stage, if there is one."""
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Stop the stage after its next samples. Finished samples are kept."""
        self._gate.is_closed = True
        if self._thread.is_alive():
            self._thread.join(CANCEL_LIMIT_S)

    def drop(self, gate: Gate) -> tuple[int, float]:
        """Stop the stage after its next samples, because its record is not needed, and wait for its end. Return the
        number of tokens that were generated, and the seconds for which the stage ran. Raises the error of the stage,
        or that of the gate of the wait."""
        self._gate.is_closed = True
        while self._thread.is_alive():
            gate.between()
            self._thread.join(_LOOK_EVERY_S)
        if not isinstance(self._error, _CancelledError):
            self.raise_error()
        return self._tokens + self._measured.aborted_tokens, self._seconds
