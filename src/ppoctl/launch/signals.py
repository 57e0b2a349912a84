"""How a job is asked to stop. The handler raises a flag and saves nothing: everything finished is committed already.

First SIGTERM or SIGINT: the current stage finishes (a rollout keeps its finished samples and stops at once), then
the job exits with 75 or 130. A second one abandons the stage.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ppoctl.errors import InterruptedByUserError, PreemptedError

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}


@dataclass
class StopFlag:
    """Raised by signals, read between stages."""

    received: int | None = None

    def check(self) -> None:
        """Raise PreemptedError after SIGTERM, InterruptedByUserError after SIGINT."""
        if self.received is None:
            return
        kind = InterruptedByUserError if self.received == signal.SIGINT else PreemptedError
        raise kind(
            f"stopped by {_NAMES[signal.Signals(self.received)]}; everything finished is committed",
            hint="ppoctl resume RUN",
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signal module's signature
        if self.received is not None:
            self.check()
        self.received = number


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """A flag wired to SIGTERM and SIGINT; earlier handlers come back afterwards."""
    flag = StopFlag()
    earlier = {number: signal.signal(number, flag._handle) for number in _NAMES}
    try:
        yield flag
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
