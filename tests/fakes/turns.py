"""Turns of the thread that generates beside the main thread: it runs only at the moments of a run, and finishes one
sample at each. So runs and kills are deterministic, and every moment of the main thread meets another sample."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ppoctl.store.parallel_run import THREAD

LIMIT_S = 60.0


class Turns:
    """The turns of one process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0.0
        self._waits = False
        self.pick: Callable[[], float] = lambda: 1
        """Returns the number of turns of the next moment."""
        self.every = 1
        """The other moments than each of this number give no turn."""

    def wait(self) -> None:
        """Wait for a turn, if this is not the main thread."""
        if threading.current_thread().name != THREAD:
            return
        with self._changed:
            self._waits = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed > 0, LIMIT_S), "the main thread gave no turn"
            self._allowed -= 1
            self._waits = False

    def give_at(self, moment: int) -> None:
        """Give the turns of a moment of the run."""
        self.give(self.pick() if moment % self.every == 0 else 0)

    def give(self, turns: float) -> None:
        """Give turns to the thread, if there is one, and wait until it has used them or ended."""
        if threading.current_thread().name == THREAD:
            return
        with self._changed:
            self._allowed = turns
            while _thread_lives() and not (self._waits and self._allowed == 0):
                self._changed.notify_all()
                self._changed.wait(0.005)
            self._allowed, self._waits = 0, self._waits and _thread_lives()

    @contextmanager
    def free_after_an_error(self) -> Iterator[None]:
        """Context whose errors end the main thread: the thread then runs until it is cancelled."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._allowed = math.inf
                self._changed.notify_all()
            raise


def _thread_lives() -> bool:
    return any(thread.name == THREAD for thread in threading.enumerate())


TURNS = Turns()
