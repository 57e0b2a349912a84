"""How a job is asked to stop: the `Gate` port on signals, on a request left in the run, and on the time that is left.
A handler saves nothing: everything finished is committed already.

First SIGTERM, SIGINT, SIGHUP or SIGUSR1 (which says that the time is nearly over): the current stage finishes, one
that draws keeps its finished samples and stops at once, and then the job exits with 75 or 130. The stage is abandoned
by a second signal, and where it cannot end in time: at once, if its last durations say so, else when the time is
over. Before there is a stage, the first signal ends the job at once.
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

from ppoctl.clock import duration
from ppoctl.errors import InterruptedByUserError, PpoctlError, PreemptedError, quoted
from ppoctl.shutdown.time_left import ENDING_S, TimeLeft, unknown

_WORDS = {
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGINT: "stopped by SIGINT",
    signal.SIGHUP: "stopped by SIGHUP",
    signal.SIGUSR1: "stopped by SIGUSR1, because its time is nearly over,",
}

AGAIN_S = 0.05
"""When a signal whose error was swallowed is sent again: by then the callback that it met has returned."""

REPEATED_S = 1.0
"""Seconds within which a second signal is the first one on another way."""

POLL_S = 1.0
"""Seconds between two looks at the clock and at what is asked of the run."""


@dataclass(frozen=True)
class _Running:
    """The stage that was let through last."""

    step: int
    stage: str
    draws: bool
    began: float
    expected_s: float | None


@dataclass
class SignalGate:
    """Shut by a signal or by a request; who asks then is told with the error that ends the job."""

    goes_on: str
    """The command that goes on later, for whoever is told of the stop."""
    keeps: str = "everything finished is committed"
    """What is not lost, for whoever is told of the stop."""
    clock: Callable[[], float] = time.time
    """Unix seconds."""
    received: int | None = None
    """The first signal."""
    request: str | None = None
    """What is asked of the run, `stage`, `step` or `now`: what the job may still finish."""
    abandons: bool = False
    """The running stage does not finish."""
    at: str = " before the first stage"
    """Where the job is, for whoever is told of the stop."""
    notify: Callable[[str], None] = lambda _: None
    """Tells a person at once that a signal was heard; called from a thread of its own."""
    _time: TimeLeft = field(default_factory=TimeLeft)
    _asked: Callable[[], str | None] = unknown
    _is_working: bool = False
    _has_worked: bool = False
    _is_over: bool = False
    _has_stopped: bool = False
    _received_at: float = 0.0
    _is_due_now: bool = False
    """The watch has seen that the time is over."""
    _requested_first: bool = False
    _running: _Running | None = None
    _until: float | None = None
    """Time by which the job must have ended, once a signal has come; None: nobody ends it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def working(self, time_left: TimeLeft, asked: Callable[[], str | None]) -> Iterator[None]:
        """Around the work of a run, in which stages run: from now on the first signal lets one finish. `asked` says
        what is asked of the run, and is cheap."""
        if self.received is not None:  # and somebody swallowed the error
            self._stop()
        self._time, self._asked, self._is_working = time_left, asked, True
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), name="gate", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                ended.set()
            self._is_working, self._has_worked = False, True

    def before(self, step: int, stage: str) -> None:
        """Raise PreemptedError or InterruptedByUserError where the stage should not run: somebody stopped the job, or
        it could not end in time."""
        self.at = f" at `{stage}` of step {step}"
        self._look()
        if self.received is not None or self._is_due(step):
            self._stop()
        needed_s = self._time.lacks_s(stage, self.clock())
        if needed_s is not None:
            self._refuse(f"`{stage}` of step {step}", needed_s)
        # One that draws stops by itself at its next sample.
        draws = bool(self._time.draws(stage))
        self._running = _Running(step, stage, draws, self.clock(), None if draws else self._time.stage_s(stage))

    def between(self) -> None:
        """Raise PreemptedError or InterruptedByUserError after a signal, and where the job is to stop now."""
        if self.received is not None or self.request == "now":
            self._stop()

    def may_save(self) -> bool:
        """Whether states that are not saved may be, now that the job stops: there is time for it, and nothing was
        interrupted that they are saved from."""
        until = self._time.ends_at if self.received is None else self._until
        return not self.abandons and self._time.has_time_to_save(until, self.clock())

    def _refuse(self, stage: str, needed_s: float) -> NoReturn:
        assert self._time.ends_at is not None
        left_s = max(self._time.ends_at - self.clock(), 0.0)
        self._has_stopped = True
        raise PreemptedError(
            f"{stage} was not begun: with a save it takes about {needed_s:.0f} s, and {left_s:.0f} s are left before "
            f"the time limit; {self.keeps}",
            hint=self.goes_on,
        )

    def _stop(self) -> NoReturn:
        self._has_stopped = True
        words = _WORDS[signal.Signals(self.received or signal.SIGTERM)]
        if self._requested_first:
            words = f"stopped by `ppoctl stop --after {quoted(self.request or '')}`"
        by_user = self._requested_first or self.received == signal.SIGINT
        kind: type[PpoctlError] = InterruptedByUserError if by_user else PreemptedError
        raise kind(f"{words}{self.at}; {self.keeps}", hint=self.goes_on)

    def _look(self) -> None:
        """See what is asked of the run; a later request may be more urgent."""
        found = self._asked()
        if found is not None:
            self._requested_first |= self.received is None
            self.request = found

    def _is_due(self, step: int) -> bool:
        """Whether what was requested ends the job before a stage of this step."""
        if self.request == "step":
            return self._running is None or step > self._running.step
        return self.request is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signal module's signature
        if self._is_over or self._is_repeated(number):
            return
        if self.received is None and self.request != "now":
            self.received, self._received_at = number, self.clock()
            self._until = self._time.until(number, self.clock())
            if self._has_worked or (self._is_working and self._ends_in_time()):
                return
        self.abandons = True
        self._stop()

    def _answer(self, number: int, times: int) -> None:
        """Say what becomes of a signal, whatever the main thread is in the middle of: the Nth that was heard."""
        name, running = signal.Signals(number).name, self._running
        if self._is_over or (number == signal.SIGUSR1 and self._is_due_now):
            return
        if times > 1 and self._is_repeated(number):
            return
        if times > 1 or self.request == "now":
            self.notify(f"{name} again: the running stage is abandoned")
        elif running is None or not self._is_working:
            self.notify(f"{name}: stopping" + (" when what is begun is saved" if self._has_worked else ""))
        elif running.draws:
            self.notify(f"{name}: stopping; finished samples of `{running.stage}` are kept")
        else:
            left = None if running.expected_s is None else running.began + running.expected_s - self.clock()
            about = "" if left is None else f", about {duration(max(left, 1.0))} more"
            self.notify(
                f"{name}: stopping after `{running.stage}` of step {running.step}{about}; once more abandons it"
            )

    def _is_repeated(self, number: int) -> bool:
        """Whether this is the same message once more: Slurm tells every process, and its script passes it on."""
        is_ours = self._is_due_now or self.abandons or self.request == "now"
        if not self._time.is_job or self.received is None or is_ours or number == signal.SIGINT:
            return False
        return self.clock() < self._received_at + REPEATED_S

    def _ends_in_time(self) -> bool:
        """Whether the running stage can be committed before the job is ended, as far as anybody knows."""
        running = self._running
        if self._until is None or running is None or running.expected_s is None:
            return True
        ends = max(running.began + running.expected_s, self.clock())
        return ends + ENDING_S <= self._until

    def _watch(self, ended: threading.Event) -> None:
        """Act on the clock and on requests while nobody asks the gate."""
        while not ended.wait(POLL_S):
            self._look()
            is_late = self._until is not None and self.clock() + ENDING_S > self._until
            with self._lock:
                if (is_late or self.request == "now") and not (self._has_stopped or ended.is_set()):
                    self._is_due_now = True
                    # To the thread that works: a system call that it waits in ends. Like a second signal.
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                    return

    def _send_again(self) -> None:
        if not self._is_over:
            os.kill(os.getpid(), self.received or signal.SIGUSR1)

    @contextmanager
    def outlasting(self) -> Iterator[None]:
        """Around code that may make another error of what a signal raised, or add to its words, as libraries do."""
        try:
            yield
        except Exception:
            if self.abandons:
                self._stop()
            raise


@contextmanager
def signal_gate(goes_on: str, notify: Callable[[str], None] = lambda _: None) -> Iterator[SignalGate]:
    """A gate that signals shut, and that answers them with `say`; earlier handlers come back afterwards. A
    SIGHUP that is ignored, as under `nohup`,
    stays ignored."""
    gate = SignalGate(goes_on, notify=notify)
    heard = [number for number in _WORDS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    earlier = {number: signal.signal(number, gate._handle) for number in heard}
    unraisable = sys.unraisablehook

    def again_if_swallowed(found: Any) -> None:
        # A signal that arrives inside a callback of the garbage collector raises where nobody can catch it.
        if isinstance(found.exc_value, InterruptedByUserError | PreemptedError) and gate.abandons:
            threading.Timer(AGAIN_S, gate._send_again).start()
        else:
            unraisable(found)

    sys.unraisablehook = again_if_swallowed
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
    """Answer signals when they arrive. Python calls a handler between two of its own instructions only: in the middle
    of a long call of an engine nobody would answer."""
    heard, woken = os.pipe()
    os.set_blocking(woken, False)
    earlier = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    seen = dict[int, int]()

    def answer() -> None:
        with open(heard, "rb", buffering=0) as signals:  # noqa: PTH123 - a pipe
            while number := signals.read(1):
                if number[0] in _WORDS:
                    times = sum(seen.values())
                    seen[number[0]] = seen.get(number[0], 0) + 1
                    gate._answer(number[0], times + 1)

    thread = threading.Thread(target=answer, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(woken)
        thread.join()
