"""Objects that the tests of `engines.child` create in a child process."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class Unportable(Exception):  # noqa: N818 - a name that is easily seen
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class Counter:
    """Adds up the numbers that it receives."""

    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, more: Sequence[int]) -> int:
        self.total += sum(more)
        return self.total

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]

    def typed(self) -> str:
        return sys.stdin.read()

    def when_told(self, file: str) -> str:
        while not Path(file).exists():
            time.sleep(0.01)
        return file

    def never(self, said: str) -> NoReturn:
        Path(said).touch()
        while True:
            time.sleep(60)

    def fail(self, *, portable: bool) -> NoReturn:
        raise KeyError("seven") if portable else Unportable("not", "seven")

    def fails(self) -> NoReturn:
        self.fail(portable=True)

    def fails_alone(self) -> NoReturn:
        self.fail(portable=False)

    def others(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())


def start_forever(said: str) -> NoReturn:
    Counter(0).never(said)


def refuse(why: str) -> NoReturn:
    raise ValueError(why)
