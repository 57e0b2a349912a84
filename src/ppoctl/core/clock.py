"""Work clock, which is stopped while a component starts (vLLM, a trainer, Ray): no stage includes that time.

Seconds of stages, tokens per second and the remaining time are measured with this clock. The module also formats
durations. It imports only the standard library.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def duration(seconds: float | None) -> str:
    """Return the seconds as `4.1s`, `42s`, `7m 42s`, `3h 07m`, `2d 03h`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for unit, word, smaller, small_word in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{word} {whole % unit // smaller:02d}{small_word}"
    return f"{whole}s"


class WorkClock:
    """Seconds of work of the main thread. The intervals in which it is stopped may be nested."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._stopped_at = 0.0
        self._lost_s = 0.0

    def now(self) -> float:
        """Return the seconds of work since an arbitrary point."""
        with self._lock:
            return (self._stopped_at if self._depth else time.monotonic()) - self._lost_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context in which the clock is stopped. Another thread does not stop it: the main thread works meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._stopped_at = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._lost_s += time.monotonic() - self._stopped_at


WORK = WorkClock()
"""Work clock of this process."""
