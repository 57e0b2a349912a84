"""Output of a running command: a live status on a terminal, plain lines otherwise.

    permanent lines       step 12/40  reward 0.781  kl 0.00312 ...
    the status            quickstart  step 13/40  1m 12s, about 2m 20s left
    (terminals only)      critic_update  minibatch 3/8  2.1s

A screen never makes a command fail: if the terminal is closed, the output is lost.
"""

import contextlib
import os
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TextIO, runtime_checkable

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ppoctl.core.activity import ACTIVITIES
from ppoctl.core.errors import without_secrets

Detail = Literal["quiet", "steps", "stages"]
"""Level of detail. `quiet`: messages; `steps`: also a line per step and evaluation; `stages`: also one per stage."""

GONE = (OSError, ValueError)
"""Errors of a write to a closed terminal or pipe; ValueError: the file object itself is closed."""
FIRST_BEAT_S = 5.0
"""Seconds without output after which a plain screen prints its status for the first time. Each later pause is twice
as long as the pause before it."""
LONGEST_PAUSE_S = 60.0


class TextStream(Protocol):
    """A stream of text lines."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class Status(Protocol):
    """Status of work in progress; it is called from any thread."""

    def rows(self, width: int, *, unicode: bool) -> list[Text]:
        """Return a few lines for a terminal of this width."""
        ...

    def in_a_line(self) -> str:
        """Return one line; empty if there is no activity."""
        ...


@runtime_checkable
class Screen(Protocol):
    """Output of a running command; it may be called from any thread."""

    @property
    def detail(self) -> Detail: ...

    def line(self, text: str) -> None:
        """Show a permanent line."""
        ...

    def metrics(self, parts: list[str]) -> None:
        """Show a permanent line of parts, with as many of them as fit."""
        ...

    def follow(self, status: Status) -> None:
        """Show this status from now on."""
        ...

    def close(self) -> None:
        """Remove the status; permanent lines remain."""
        ...


class Waiting:
    """Status before the run starts: it shows the current preparation."""

    def rows(self, width: int, *, unicode: bool) -> list[Text]:  # noqa: ARG002 - the protocol's signature
        return [Text(self.in_a_line())]

    def in_a_line(self) -> str:
        activity = ACTIVITIES.now()
        return "" if activity is None else plain(activity.timed())


@contextlib.contextmanager
def open_screen(detail: Detail = "steps", stream: TextIO | None = None) -> Iterator[Screen]:
    """Yield the screen that fits the stream (default: stderr)."""
    stream = stream or sys.stderr
    screen: Screen
    if detail == "quiet":
        screen = PlainScreen(stream, detail, beats=False)
    elif stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        screen = LiveScreen(RichConsole(file=stream, highlight=False), detail)
    else:
        screen = PlainScreen(stream, detail)
    prints = detail != "quiet" and isinstance(screen, PlainScreen)
    with contextlib.closing(screen), ACTIVITIES.notifying(screen.line) if prints else contextlib.nullcontext():
        yield screen


@dataclass(frozen=True)
class LogFile:
    """Stream into a file that is opened for each line. Each line starts with the local time.

    If the disk is full or the folder was deleted, lines are lost without an error.
    """

    path: Path

    def write(self, text: str, /) -> int:
        with self.path.open("a", encoding="ascii") as file:
            return file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {without_secrets(text)}")

    def flush(self) -> None:
        """Do nothing: closing the file has flushed it."""


class PlainScreen:
    """Screen of ASCII lines without control characters, for logs.

    With `beats`, the screen prints its status after a time without output.
    """

    def __init__(
        self,
        stream: TextStream,
        detail: Detail = "steps",
        *,
        beats: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.detail: Detail = detail
        self._stream = stream
        self._clock = clock
        self._last_output = clock()
        self._pause_s = FIRST_BEAT_S
        self._status: Status = Waiting()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if beats:
            threading.Thread(target=self._beat, name="screen", daemon=True).start()

    def line(self, text: str) -> None:
        with self._lock, contextlib.suppress(*GONE):
            self._last_output = self._clock()
            self._stream.write(plain(text) + "\n")
            self._stream.flush()

    def metrics(self, parts: list[str]) -> None:
        self.line("  ".join(parts))

    def follow(self, status: Status) -> None:
        self._status = status

    def close(self) -> None:
        self._closed.set()

    def beat(self) -> None:
        """Print the status if there was no output for long enough."""
        if self._clock() - self._last_output < self._pause_s:
            return
        if text := self._status.in_a_line():
            self.line(text)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _beat(self) -> None:
        while not self._closed.wait(1.0):
            self.beat()


class LiveScreen:
    """Screen of a terminal: permanent lines scroll above a status that redraws itself."""

    def __init__(self, console: RichConsole, detail: Detail = "steps", *, refresh_per_second: float = 4.0) -> None:
        self.detail: Detail = detail
        self._console = console
        self._unicode = console.encoding.startswith("utf")
        self._status: Status = Waiting()
        self._echo = _without_echo_of_controls(console.file)
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=refresh_per_second,
            transient=True,
            # Rich prints redirected output to its own console, which is stderr. Data of a piped stdout must not be
            # printed there.
            redirect_stdout=sys.stdout.isatty(),
        )
        with contextlib.suppress(*GONE):
            self._live.start()

    def line(self, text: str) -> None:
        with contextlib.suppress(*GONE):
            self._console.print(Text(plain(text)), soft_wrap=True)  # so that a command in the line can be copied

    def metrics(self, parts: list[str]) -> None:
        while len(parts) > 2 and len("  ".join(parts)) > self._console.width:
            parts = parts[:-1]
        self.line("  ".join(parts))

    def follow(self, status: Status) -> None:
        self._status = status

    def close(self) -> None:
        with contextlib.suppress(*GONE):
            self._live.stop()
        self._echo()

    def _render(self) -> Group:
        # One column less than the width, so that a line does not wrap at once if the terminal becomes narrower.
        width = max(self._console.width - 1, 10)
        rows = self._status.rows(width, unicode=self._unicode)
        for row in rows:
            row.truncate(width, overflow="ellipsis" if self._unicode else "crop")
            row.no_wrap = True
        return Group(*rows)


def _without_echo_of_controls(file: object) -> Callable[[], None]:
    """Keep the terminal from printing `^C` into the status; return a function that restores its settings."""
    try:
        terminal: int = file.fileno()  # type: ignore[attr-defined]
        before = termios.tcgetattr(terminal)
    except (AttributeError, OSError, ValueError, termios.error):
        return lambda: None
    without = [*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]]

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    with contextlib.suppress(OSError, termios.error):
        termios.tcsetattr(terminal, termios.TCSADRAIN, without)
    return restore


def plain(text: str) -> str:
    """Return the text as one line of printable ASCII; text of a model may contain escape sequences."""
    ascii_text = text.encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else " " for char in ascii_text)
