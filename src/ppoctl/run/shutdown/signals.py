"""The `Gate` port. The gate closes on a signal, a stop request in the run directory, or the end of a job's time.

A signal handler saves nothing: all finished work is already committed.

After the first SIGTERM, SIGINT, SIGHUP or SIGUSR1 (near the time limit), the current stage finishes and the job
exits with 75 or 130. A stage that generates keeps its finished samples and stops at once. A second signal abandons
the stage. A stage that cannot end in time is abandoned too: at once if its last durations show this, otherwise when
the remaining time is over. Before the first stage, the first signal ends the job at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from ppoctl.core.clock import duration
from ppoctl.core.errors import InterruptedByUserError, PpoctlError, PreemptedError, quoted
from ppoctl.run.shutdown.time_left import ENDING_S, TimeLeft, unknown

_WORDS = {
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGINT: "stopped by SIGINT",
    signal.SIGHUP: "stopped by SIGHUP",
    signal.SIGUSR1: "stopped by SIGUSR1, because its time limit is near,",
}

AGAIN_S = 0.05
"""Seconds after which a signal whose error was swallowed is sent again; the callback that swallowed the error has
returned by then."""

REPEATED_S = 1.0
"""Seconds within which a second signal is considered a copy of the first."""


@dataclass(frozen=True)
class _Running:
    """The stage that started last."""

    step: int
    stage: str
    draws: bool
    began: float
    expected_s: float | None


@dataclass
class SignalGate:
    """Gate that closes after a signal or a stop request. Its checks then raise the error that ends the job."""

    is_resumable: str
    """Command that continues the work later; it is the hint of the error."""
    keeps: str = "everything finished is committed"
    """Clause of the error about the work that is not lost."""
    clock: Callable[[], float] = time.time
    """Function that returns the present time in unix seconds."""
    received: int | None = None
    """Number of the first signal; None: no signal was received."""
    request: str | None = None
    """Stop request for the run: finish the `stage`, the `step`, or nothing (`now`)."""
    abandons: bool = False
    """Whether the running stage is abandoned."""
    at: str = " before the first stage"
    """Clause of the error about the stage at which the job stopped."""
    notify: Callable[[str], None] = lambda _: None
    """Receives a message when a signal arrives; called from a separate thread."""
    poll_s: float = 1.0
    """Seconds between two checks of the remaining time and of the stop request."""
    _time: TimeLeft = field(default_factory=TimeLeft)
    _read_request: Callable[[], str | None] = unknown
    _is_working: bool = False
    _has_worked: bool = False
    _is_over: bool = False
    _has_stopped: bool = False
    _received_at: float = 0.0
    _is_due_now: bool = False
    """Whether the watch thread has found that the job must stop now."""
    _requested_first: bool = False
    _running: _Running | None = None
    _until: float | None = None
    """Time by which the job must have ended after a signal, in unix seconds; None: no deadline."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def working(self, time_left: TimeLeft, asked: Callable[[], str | None]) -> Iterator[None]:
        """Enclose the stages of a run. Inside the block, the first signal lets the current stage finish.

        `asked` returns the stop request of the run; it is called every second and before each stage.
        """
        if self.received is not None:  # a library swallowed the error of an earlier signal
            self._stop()
        self._time, self._read_request, self._is_working = time_left, asked, True
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), name="gate", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                ended.set()
            self._is_working, self._has_worked = False, True

    def before(self, step: int, stage: str) -> None:
        """Raise PreemptedError or InterruptedByUserError if the stage must not run.

        A stage must not run after a signal or a stop request, or if it cannot end before the time limit.
        """
        self.at = f" at `{stage}` of step {step}"
        self._look()
        if self.received is not None or self._is_due(step):
            self._stop()
        needed_s = self._time.lacks_s(stage, self.clock())
        if needed_s is not None:
            self._refuse(f"`{stage}` of step {step}", needed_s)
        # A stage that generates stops by itself after its next sample, so its duration does not matter.
        draws = bool(self._time.draws(stage))
        self._running = _Running(step, stage, draws, self.clock(), None if draws else self._time.stage_s(stage))

    def between(self) -> None:
        """Raise PreemptedError or InterruptedByUserError after a signal or a stop request for `now`."""
        if self.received is not None or self.request == "now":
            self._stop()

    def may_save(self) -> bool:
        """Return whether unsaved states may be saved during the stop.

        The result is True if there is enough time and no stage was abandoned. After an abandoned stage, the state of
        a trainer is undefined.
        """
        until = self._time.ends_at if self.received is None else self._until
        return not self.abandons and self._time.has_time_to_save(until, self.clock())

    def _refuse(self, stage: str, needed_s: float) -> NoReturn:
        assert self._time.ends_at is not None
        left_s = max(self._time.ends_at - self.clock(), 0.0)
        self._has_stopped = True
        raise PreemptedError(
            f"{stage} was not started: with a save it takes about {needed_s:.0f} s, but only {left_s:.0f} s are left "
            f"before the time limit; {self.keeps}",
            hint=self.is_resumable,
        )

    def _stop(self) -> NoReturn:
        self._has_stopped = True
        words = _WORDS[signal.Signals(self.received or signal.SIGTERM)]
        if self._requested_first:
            words = f"stopped by `ppoctl stop --after {quoted(self.request or '')}`"
        by_user = self._requested_first or self.received == signal.SIGINT
        kind: type[PpoctlError] = InterruptedByUserError if by_user else PreemptedError
        raise kind(f"{words}{self.at}; {self.keeps}", hint=self.is_resumable)

    def _look(self) -> None:
        """Read the stop request of the run; a later request replaces an earlier one."""
        request = self._read_request()
        if request is not None:
            self._requested_first |= self.received is None
            self.request = request

    def _is_due(self, step: int) -> bool:
        """Return whether the stop request ends the job before a stage of this step."""
        if self.request == "step":
            return self._running is None or step > self._running.step
        return self.request is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signal module's signature
        if self._is_over or self._is_repeated(number):
            return
        if number == signal.SIGUSR1 and self._is_due_now and self._has_stopped:  # the watch thread sent it again
            return
        if self.received is None and self.request != "now":
            self.received, self._received_at = number, self.clock()
            self._until = self._time.until(number, self.clock())
            if self._has_worked or (self._is_working and self._ends_in_time()):
                return
        self.abandons = True
        self._stop()

    def _answer(self, number: int, times: int) -> None:
        """Report the effect of a signal at once, even if the main thread is in a long call.

        `times` is the number of signals so far, including this one.
        """
        name, running = signal.Signals(number).name, self._running
        if self._is_over or (number == signal.SIGUSR1 and self._is_due_now):
            return
        if times > 1 and self._is_repeated(number):
            return
        if times > 1 or self.request == "now":
            self.notify(f"{name} again: the running stage is abandoned")
        elif running is None or not self._is_working:
            self.notify(f"{name}: stopping" + (" when unfinished saves are written" if self._has_worked else ""))
        elif running.draws:
            self.notify(f"{name}: stopping; finished samples of `{running.stage}` are kept")
        else:
            left = None if running.expected_s is None else running.began + running.expected_s - self.clock()
            about = "" if left is None else f", about {duration(max(left, 1.0))} more"
            self.notify(
                f"{name}: stopping after `{running.stage}` of step {running.step}{about}; a second signal abandons it"
            )

    def _is_repeated(self, number: int) -> bool:
        """Return whether this signal is a copy of the first: Slurm and the batch script both send it."""
        is_ours = self._is_due_now or self.abandons or self.request == "now"
        if not self._time.is_job or self.received is None or is_ours or number == signal.SIGINT:
            return False
        return self.clock() < self._received_at + REPEATED_S

    def _ends_in_time(self) -> bool:
        """Return whether the running stage can be committed before the deadline; True if its duration is unknown."""
        running = self._running
        if self._until is None or running is None or running.expected_s is None:
            return True
        ends = max(running.began + running.expected_s, self.clock())
        return ends + ENDING_S <= self._until

    def _watch(self, ended: threading.Event) -> None:
        """Check the remaining time, and whether a stop was requested, while the main thread is inside a stage."""
        while not ended.wait(self.poll_s):
            self._look()
            is_late = self._until is not None and self.clock() + ENDING_S > self._until
            with self._lock:
                if (is_late or self.request == "now") and not (self._has_stopped or ended.is_set()):
                    self._is_due_now = True
                    # The signal is sent to the main thread, so that its blocking system call returns. The handler
                    # treats it like a second signal. It is sent again until the handler has run: a signal just before
                    # a system call begins does not end this call.
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _send_again(self) -> None:
        if not self._is_over:
            os.kill(os.getpid(), self.received or signal.SIGUSR1)

    @contextmanager
    def outlasting(self) -> Iterator[None]:
        """Enclose library calls that may replace the error of a signal by another error, or extend its message."""
        try:
            yield
        except Exception:
            if self.abandons:
                self._stop()
            raise


@contextmanager
def signal_gate(goes_on: str, notify: Callable[[str], None] = lambda _: None) -> Iterator[SignalGate]:
    """Yield a gate that signals close, and that reports them by `notify`. Earlier handlers are restored at the end.

    An ignored SIGHUP, as under `nohup`, stays ignored.
    """
    gate = SignalGate(goes_on, notify=notify)
    handled = [number for number in _WORDS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    earlier = {number: signal.signal(number, gate._handle) for number in handled}
    unraisable = sys.unraisablehook

    def resend_if_swallowed(hook_args: Any) -> None:
        # An error inside a callback of the garbage collector cannot be caught, so the signal is sent again.
        if isinstance(hook_args.exc_value, InterruptedByUserError | PreemptedError) and gate.abandons:
            gate._has_stopped = False
            threading.Timer(AGAIN_S, gate._send_again).start()
        else:
            unraisable(hook_args)

    sys.unraisablehook = resend_if_swallowed
    try:
        with _answered(gate), gate.outlasting():
            yield gate
    finally:
        gate._is_over = True
        sys.unraisablehook = unraisable
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _answered(gate: SignalGate) -> Iterator[None]:
    """Report signals at the moment of their arrival.

    Python runs a signal handler only between two bytecode instructions, so no handler runs during a long call of an
    engine.
    """
    reading, writing = os.pipe()
    # Python accepts only a descriptor that does not block.
    os.set_blocking(writing, False)
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    counts = dict[int, int]()

    def answer() -> None:
        with open(reading, "rb", buffering=0) as signals:  # noqa: PTH123 - a pipe
            while number := signals.read(1):
                if number[0] in _WORDS:
                    times = sum(counts.values())
                    counts[number[0]] = counts.get(number[0], 0) + 1
                    gate._answer(number[0], times + 1)

    thread = threading.Thread(target=answer, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # First, so that Python writes no signal to a closed descriptor.
        signal.set_wakeup_fd(earlier)
        os.close(writing)
        thread.join()
