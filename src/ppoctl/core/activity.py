"""Current activity of this process, for screens: nested activities, each with an optional count.

The code that does the work reports its activity (`ACTIVITIES.track`, `preparing`), and screens read it
(`ACTIVITIES.now`). Neither depends on the other. This module imports only the standard library.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ppoctl.core.clock import WORK, duration

OnPreparing = Callable[[str], None]
Item = TypeVar("Item")


@dataclass
class Activity:
    """Work in progress."""

    what: str
    """Short description, such as `starting vLLM` or `minibatch`."""
    total: int | None = None
    """Number of items; None: not counted."""
    done: int = 0
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        """Return the description with its count, `minibatch 3/8`."""
        return self.what if self.total is None else f"{self.what} {self.done}/{self.total}"

    def seconds(self) -> float:
        """Return the seconds since the activity began."""
        return time.monotonic() - self.since

    def timed(self) -> str:
        """Return the description with its count and age, `starting vLLM  4.1s`."""
        return f"{self}  {duration(self.seconds())}"


class Activities:
    """Activities of one process, of all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._activities: list[Activity] = []
        self._callbacks: list[OnPreparing] = []

    def now(self) -> Activity | None:
        """Return the newest activity that has not ended; None: no activity was reported."""
        with self._lock:
            return self._activities[-1] if self._activities else None

    @contextmanager
    def track(self, what: str, total: int | None = None) -> Iterator[Activity]:
        """Context of an activity. Code inside it may update the count."""
        activity = Activity(what, total)
        with self._lock:
            self._activities.append(activity)
        try:
            yield activity
        finally:
            with self._lock:
                self._activities = [other for other in self._activities if other is not activity]

    @contextmanager
    def notifying(self, callback: OnPreparing) -> Iterator[None]:
        """Context in which `callback` receives a description of each preparation when it begins."""
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)

    def notify(self, what: str) -> None:
        """Send the description of a preparation to all callbacks."""
        for callback in list(self._callbacks):
            callback(what)


ACTIVITIES = Activities()
"""Activities of this process."""


@contextmanager
def preparing(what: str) -> Iterator[Activity]:
    """Context of a preparation before work can begin, such as the start of an engine. The work clock is stopped in
    this context. A preparation inside one with the same description is not reported again."""
    if (around := ACTIVITIES.now()) is None or around.what != what:
        ACTIVITIES.notify(what)
    with WORK.stopped(), ACTIVITIES.track(what) as activity:
        yield activity


@contextmanager
def loading(what: str) -> Iterator[Activity]:
    """Context of slow imports. Garbage collection is off, because scanning the new objects would cost a third of the
    import time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with preparing(f"loading {what}") as activity:
            yield activity
    finally:
        if was_on:
            gc.enable()


def track_items(items: Sequence[Item], what: str) -> Iterator[tuple[int, Item]]:
    """Iterate over (number from 0, item) as an activity that counts the current item."""
    with ACTIVITIES.track(what, len(items)) as activity:
        for number, item in enumerate(items):
            activity.done = number + 1
            yield number, item
