"""What a process of Ray is doing, told by this one as if it did it: `minibatch 3/8` of a trainer's first rank."""

from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayError

from ppoctl.doing import DOING, Act


class Watched:
    """The act of one process at a time, asked for without waiting for the answer."""

    def __init__(self) -> None:
        self._asked: Any = None
        self._shown = ExitStack()
        self._act: Act | None = None

    def look(self, process: Any) -> None:
        """Take note of the answer where it has come, and ask this process again."""
        if self._asked is not None:
            if not ray.wait([self._asked], timeout=0)[0]:
                return
            self._show(_answer(self._asked))
        self._asked = process.act.options(concurrency_group="watch").remote()

    def close(self) -> None:
        """Say no more."""
        self._show(None)

    def _show(self, act: Act | None) -> None:
        if act is None or self._act is None or (act.what, act.total) != (self._act.what, self._act.total):
            self._shown.close()
            self._act = None if act is None else self._shown.enter_context(DOING.at(act.what, act.total))
        if act is not None and self._act is not None:
            self._act.done = act.done


def _answer(asked: Any) -> Act | None:
    """Nothing of a process that is gone: whoever waits for its work hears why."""
    try:
        act: Act | None = ray.get(asked)
    except RayError:
        return None
    return act
