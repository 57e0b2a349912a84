"""What a process of Ray is doing, told by this one as if it did it: `minibatch 3/8` of a trainer's first rank."""

from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayError

from ppoctl.activity import ACTIVITIES, Activity

ANSWER_S = 0.2
"""Seconds in which a process that can say what it does has said so."""


class RemoteActivity:
    """The act of one process at a time."""

    def __init__(self) -> None:
        self._asked: Any = None
        self._shown = ExitStack()
        self._act: Activity | None = None

    def look(self, act: Any) -> None:
        """Ask a process what it does, by this method of it, and show it. Where the answer takes long, the next look
        has it."""
        self._asked = self._asked or act.remote()
        if ray.wait([self._asked], timeout=ANSWER_S)[0]:
            asked, self._asked = self._asked, None
            self.show(_answer(asked))

    def show(self, act: Activity | None) -> None:
        """Show this act in place of the one before; None: show none."""
        if act is None or self._act is None or (act.what, act.total) != (self._act.what, self._act.total):
            self._shown.close()
            self._act = None if act is None else self._shown.enter_context(ACTIVITIES.track(act.what, act.total))
        if act is not None and self._act is not None:
            self._act.done = act.done

    def close(self) -> None:
        """Show no more."""
        self.show(None)


def _answer(asked: Any) -> Activity | None:
    """Nothing of a process that is gone: whoever waits for its work hears why."""
    try:
        act: Activity | None = ray.get(asked)
    except RayError:
        return None
    return act
