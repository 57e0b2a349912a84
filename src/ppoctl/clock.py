"""The clock of work: it stands still while something starts (vLLM, a trainer, Ray): no stage is charged for that.

Seconds of stages, tokens per second and the time that is left are read from it. Light.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class WorkClock:
    """Seconds of one process; `start` intervals may lie within each other, and count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._stopped_at = 0.0
        self._lost_s = 0.0

    def now(self) -> float:
        """Seconds of work since an arbitrary point."""
        with self._lock:
            return (self._stopped_at if self._depth else time.monotonic()) - self._lost_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Around what starts something."""
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
"""The clock of this process."""
