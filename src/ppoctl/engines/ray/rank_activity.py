"""The activity of a Ray process, which the driver shows as its own activity: for example `minibatch 3/8`, the
activity of a trainer's first rank."""

from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayError

from ppoctl.core.activity import ACTIVITIES, Activity

ANSWER_S = 0.2
"""Seconds within which a responsive process reports its activity."""


class RemoteActivity:
    """Display of the activity of one process at a time."""

    def __init__(self) -> None:
        self._pending: Any = None
        self._shown = ExitStack()
        self._act: Activity | None = None

    def look(self, act: Any) -> None:
        """Call `act`, the method of a process that returns its activity, and show the activity. If the reply is late,
        the next call shows the activity."""
        self._pending = self._pending or act.remote()
        if ray.wait([self._pending], timeout=ANSWER_S)[0]:
            reply, self._pending = self._pending, None
            self.show(_answer(reply))

    def show(self, act: Activity | None) -> None:
        """Show this activity instead of the previous one. None: show no activity."""
        if act is None or self._act is None or (act.what, act.total) != (self._act.what, self._act.total):
            self._shown.close()
            self._act = None if act is None else self._shown.enter_context(ACTIVITIES.track(act.what, act.total))
        if act is not None and self._act is not None:
            self._act.done = act.done

    def close(self) -> None:
        """Stop showing an activity."""
        self.show(None)


def _answer(reply: Any) -> Activity | None:
    """Return the activity in this reply. None: the process has no activity, or has ended. The caller that waits for
    the result of the process gets the error."""
    try:
        act: Activity | None = ray.get(reply)
    except RayError:
        return None
    return act
