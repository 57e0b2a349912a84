"""What this process is doing right now, for whoever shows it: acts within acts, each with a count if it has one.

Who works says so (`DOING.at`, `preparing`); who shows asks (`DOING.now`). Neither knows the other. Light.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ppoctl.clock import WORK, duration

OnPreparing = Callable[[str], None]
Item = TypeVar("Item")


@dataclass
class Activity:
    """Something that is being done."""

    what: str
    """A few words: `starting vLLM`, `minibatch`."""
    total: int | None = None
    """How many there are to do; None: nobody counts."""
    done: int = 0
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        """The act with its count, `minibatch 3/8`."""
        return self.what if self.total is None else f"{self.what} {self.done}/{self.total}"

    def seconds(self) -> float:
        """How long it has been going on."""
        return time.monotonic() - self.since

    def timed(self) -> str:
        """The act with its count and its age, `starting vLLM  4.1s`."""
        return f"{self}  {duration(self.seconds())}"


class Activities:
    """Acts of one process, of all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acts: list[Activity] = []
        self._heard: list[OnPreparing] = []

    def now(self) -> Activity | None:
        """The act that began last and goes on; None: nobody said anything."""
        with self._lock:
            return self._acts[-1] if self._acts else None

    @contextmanager
    def track(self, what: str, total: int | None = None) -> Iterator[Activity]:
        """Context of an act; whoever works in it may count."""
        act = Activity(what, total)
        with self._lock:
            self._acts.append(act)
        try:
            yield act
        finally:
            with self._lock:
                self._acts = [each for each in self._acts if each is not act]

    @contextmanager
    def notifying(self, heard: OnPreparing) -> Iterator[None]:
        """Context in which `heard` is told in words of each thing that is prepared, when it begins."""
        self._heard.append(heard)
        try:
            yield
        finally:
            self._heard.remove(heard)

    def notify(self, what: str) -> None:
        """Tell whoever hears what is being prepared."""
        for heard in list(self._heard):
            heard(what)


ACTIVITIES = Activities()
"""What this process does."""


@contextmanager
def preparing(what: str) -> Iterator[Activity]:
    """Context of what must be there before work can begin: an engine, a trainer, data. The clock of work stands
    still."""
    ACTIVITIES.notify(what)
    with WORK.stopped(), ACTIVITIES.track(what) as act:
        yield act


@contextmanager
def loading(what: str) -> Iterator[Activity]:
    """Context of imports that take long. What is imported stays, and looking for garbage among it would cost a third
    of their time: that waits."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with preparing(f"loading {what}") as act:
            yield act
    finally:
        if was_on:
            gc.enable()


def track_items(items: Sequence[Item], what: str) -> Iterator[tuple[int, Item]]:
    """The items with their numbers, from 0, as an act that counts the one that is worked on."""
    with ACTIVITIES.track(what, len(items)) as act:
        for number, item in enumerate(items):
            act.done = number + 1
            yield number, item
