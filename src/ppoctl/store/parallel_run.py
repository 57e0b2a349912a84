"""Stages that run in a thread of their own, while the main thread runs the stages after them.

    main thread:  begin --> other stages --> finish: wait, commit
    thread:             --> generate, keep finished samples -->

The engines hold the weights of one state, so one stage runs at a time. If a step begins the next before the last has
ended (`rollout.ahead = 2`), it waits. It begins between two stages once the last has ended, at the latest before the
update of the state whose weights it needs:

    step         n                              n + 1
    main thread  reward .. critic | update      reward .. critic | update
    thread       ...of n + 1 | of n + 2 ----------------| of n + 3 ------

Only the main thread uses trainers, commits records and writes the journal. The thread uses the engines, and writes
the finished samples of its stage.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ppoctl.core.batch.records import Record, State
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

    def finish(self) -> None:
        """Wait for the stage and commit its record. Raises the error of the stage, or that of the gate."""
        began, gate = WORK.now(), self._wait()
        while self._thread.is_alive():
            gate.between()
            if self._progress is not None:
                self._on_progress(*self._progress)
                self._progress = None
            self._thread.join(_LOOK_EVERY_S)
        self._commit_ended(WORK.now() - began)

    def finish_if_ended(self) -> bool:
        """Commit the record if the stage has ended, and return whether it has. Raises the error of the stage."""
        self.raise_error()
        if self._thread.is_alive():
            return False
        self._commit_ended(0.0)
        return True

    def _commit_ended(self, waited_s: float) -> None:
        self.raise_error()
        assert self._record is not None, "the thread ended with a record or an error"
        self._commit(self._record, self._measured, waited_s)

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


@dataclass(frozen=True)
class _Waiting:
    """A stage that waits for the running one."""

    step: int
    reads: tuple[State, ...]
    """States that trainers must still hold when the stage begins."""
    begin: Callable[[], ParallelRun | None]


class ParallelRuns:
    """The stages of a run that run beside others: at most one runs, and at most one waits for it."""

    def __init__(self) -> None:
        self._running: tuple[int, ParallelRun] | None = None
        self._waiting: _Waiting | None = None

    @property
    def first_open_step(self) -> int | None:
        """First step with a stage that is not committed; None: there is none."""
        if self._running is not None:
            return self._running[0]
        return None if self._waiting is None else self._waiting.step

    def begin(self, step: int, reads: tuple[State, ...], begin: Callable[[], ParallelRun | None]) -> None:
        """Begin a stage of a step, or let it wait until the running one has ended. `begin` returns None if the stage
        is committed. Raises its errors, and those of the running stage."""
        assert self._waiting is None, "a step begins one stage"
        self._waiting = _Waiting(step, reads, begin)
        self.look()

    def look(self) -> None:
        """Begin the stage that waits, if the running one has ended, which is then committed. Raises the errors of
        both."""
        if self._running is not None:
            self._running[1].raise_error()
            if self._waiting is None or not self._running[1].finish_if_ended():
                return
        self._begin_waiting()

    def before_update(self, state: object) -> None:
        """Let the stage that waits begin, if it reads the state, which is about to change."""
        if self._waiting is not None and state in self._waiting.reads:
            self._finish_running()

    def finish(self, *, up_to: int | None = None) -> None:
        """Wait for the stages of steps up to this one (None: all), and commit them. Raises their errors."""
        while (step := self.first_open_step) is not None and (up_to is None or step <= up_to):
            self._finish_running()

    def drop(self, gate: Gate) -> tuple[int, float]:
        """Stop the running stage, if there is one, because its record is not needed. Return the number of tokens
        that were generated, and the seconds for which it ran. Raises its error, or that of the gate of the wait."""
        used = (0, 0.0) if self._running is None else self._running[1].drop(gate)
        self._running = None
        return used

    @contextmanager
    def cancelled_if_it_fails(self) -> Iterator[None]:
        """Context that stops the running stage after an error. Its finished samples are kept."""
        try:
            yield
        except BaseException:
            if self._running is not None:
                self._running[1].cancel()
            raise

    def _finish_running(self) -> None:
        if self._running is not None:
            self._running[1].finish()
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin the stage that waits. No stage runs."""
        self._running, waiting, self._waiting = None, self._waiting, None
        if waiting is None:
            return
        if (run := waiting.begin()) is not None:
            self._running = waiting.step, run
            run.start()
