"""How a job is asked to stop: the `Gate` port on signals. The handler saves nothing: everything finished is committed
already.

First SIGTERM or SIGINT: the current stage finishes (one that draws keeps its finished samples and stops at once),
then the job exits with 75 or 130. A second one abandons the stage.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ppoctl.errors import InterruptedByUserError, PreemptedError

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}


AGAIN_S = 0.05
"""When a signal whose error was swallowed is sent again: by then the callback that it met has returned."""


@dataclass
class SignalGate:
    """Shut by a signal; who asks then is told with the error that ends the job."""

    goes_on: str
    """The command that goes on later, for whoever is told of the stop."""
    received: int | None = None
    abandons: bool = False
    """A second signal came."""
    at: str = ""
    """Where the job is, for whoever is told of the stop."""

    def before(self, step: int, stage: str) -> None:
        self.at = f" at `{stage}` of step {step}"
        self.between()

    def between(self) -> None:
        """Raise PreemptedError after SIGTERM, InterruptedByUserError after SIGINT."""
        if self.received is None:
            return
        kind = InterruptedByUserError if self.received == signal.SIGINT else PreemptedError
        raise kind(
            f"stopped by {_NAMES[signal.Signals(self.received)]}{self.at}; everything finished is committed",
            hint=self.goes_on,
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signal module's signature
        if self.received is not None:
            self.abandons = True
            self.between()
        self.received = number

    @contextmanager
    def outlasting(self) -> Iterator[None]:
        """Around code that may make another error of what a second signal raised, as libraries do."""
        try:
            yield
        except (InterruptedByUserError, PreemptedError):
            raise
        except Exception:
            if self.abandons:
                self.between()
            raise


@contextmanager
def signal_gate(goes_on: str) -> Iterator[SignalGate]:
    """A gate that SIGTERM and SIGINT shut; earlier handlers come back afterwards."""
    gate = SignalGate(goes_on)
    earlier = {number: signal.signal(number, gate._handle) for number in _NAMES}
    unraisable = sys.unraisablehook

    def again_if_swallowed(found: Any) -> None:
        # A signal that arrives inside a callback of the garbage collector raises where nobody can catch it.
        if isinstance(found.exc_value, InterruptedByUserError | PreemptedError) and gate.received is not None:
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), gate.received)).start()
        else:
            unraisable(found)

    sys.unraisablehook = again_if_swallowed
    try:
        yield gate
    finally:
        sys.unraisablehook = unraisable
        for number, handler in earlier.items():
            signal.signal(number, handler)
