"""Where a command talks to a person while it works: a live status on a terminal, plain lines anywhere else.

    lines that stay       step 12/40  reward 0.781  kl 0.00312 ...
    the status            quickstart  step 13/40  1m 12s, about 2m 20s left
    (terminals only)      critic_update  minibatch 3/8  2.1s

A screen never fails a command: what a terminal that went away does not take is lost.
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

from ppoctl.activity import ACTIVITIES
from ppoctl.errors import without_secrets

Detail = Literal["quiet", "steps", "stages"]
"""How much is told: messages only; also a line per step and evaluation; also one per stage."""

GONE = (OSError, ValueError)
"""What writing to a closed terminal or pipe raises; ValueError: the file object itself is closed."""
FIRST_BEAT_S = 5.0
"""Seconds of silence after which plain lines say what is going on, for the first time; each time the next pause is
twice as long."""
LONGEST_PAUSE_S = 60.0


class TextStream(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class Status(Protocol):
    """What a screen shows of work in progress; asked from any thread."""

    def rows(self, width: int, *, unicode: bool) -> list[Text]:
        """A few lines for a terminal of this width."""
        ...

    def in_a_line(self) -> str:
        """One line; empty where there is nothing to say."""
        ...


@runtime_checkable
class Screen(Protocol):
    """What a command says while it works; it may be called from any thread."""

    @property
    def detail(self) -> Detail: ...

    def line(self, text: str) -> None:
        """Show one line that stays."""
        ...

    def metrics(self, parts: list[str]) -> None:
        """Show a line of parts that stays, with as many of them as there is room for."""
        ...

    def follow(self, status: Status) -> None:
        """Show this status from now on."""
        ...

    def close(self) -> None:
        """Leave what was said on the screen, and no status."""
        ...


class Waiting:
    """The status before there is a run: what is being prepared."""

    def rows(self, width: int, *, unicode: bool) -> list[Text]:  # noqa: ARG002 - the protocol's signature
        return [Text(self.in_a_line())]

    def in_a_line(self) -> str:
        act = ACTIVITIES.now()
        return "" if act is None else plain(act.timed())


@contextlib.contextmanager
def open_screen(detail: Detail = "steps", stream: TextIO | None = None) -> Iterator[Screen]:
    """Context of the screen that fits the stream (default: stderr)."""
    stream = stream or sys.stderr
    screen: Screen
    if detail == "quiet":
        screen = PlainScreen(stream, detail, beats=False)
    elif stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        screen = LiveScreen(RichConsole(file=stream, highlight=False), detail)
    else:
        screen = PlainScreen(stream, detail)
    tells = detail != "quiet" and isinstance(screen, PlainScreen)
    with contextlib.closing(screen), ACTIVITIES.notifying(screen.line) if tells else contextlib.nullcontext():
        yield screen


@dataclass(frozen=True)
class LogFile:
    """Stream into a file that is opened for each line, which gets the time of this machine: a full disk or a folder
    that went away costs lines, and no more."""

    path: Path

    def write(self, text: str, /) -> int:
        with self.path.open("a", encoding="ascii") as file:
            return file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {without_secrets(text)}")

    def flush(self) -> None:
        """Do nothing: closing the file has done it."""


class PlainScreen:
    """Screen of lines in ASCII without control characters: they end up in logs. With `beats` it says what is going on
    when it has said nothing for a while."""

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
        self._said = clock()
        self._pause_s = FIRST_BEAT_S
        self._status: Status = Waiting()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if beats:
            threading.Thread(target=self._beat, name="screen", daemon=True).start()

    def line(self, text: str) -> None:
        with self._lock, contextlib.suppress(*GONE):
            self._said = self._clock()
            self._stream.write(plain(text) + "\n")
            self._stream.flush()

    def metrics(self, parts: list[str]) -> None:
        self.line("  ".join(parts))

    def follow(self, status: Status) -> None:
        self._status = status

    def close(self) -> None:
        self._closed.set()

    def beat(self) -> None:
        """Say what is going on, if there was silence for long enough."""
        if self._clock() - self._said < self._pause_s:
            return
        if text := self._status.in_a_line():
            self.line(text)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _beat(self) -> None:
        while not self._closed.wait(1.0):
            self.beat()


class LiveScreen:
    """Screen of a terminal: lines scroll by above a status that redraws itself."""

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
            # Rich prints what it redirects to its own console, here stderr: data that someone pipes from stdout
            # must not go there.
            redirect_stdout=sys.stdout.isatty(),
        )
        with contextlib.suppress(*GONE):
            self._live.start()

    def line(self, text: str) -> None:
        with contextlib.suppress(*GONE):
            self._console.print(Text(plain(text)), soft_wrap=True)  # a command in it can be copied

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
        # One column less than there is: a terminal that becomes narrower breaks no line that was short enough.
        width = max(self._console.width - 1, 10)
        rows = self._status.rows(width, unicode=self._unicode)
        for row in rows:
            row.truncate(width, overflow="ellipsis" if self._unicode else "crop")
            row.no_wrap = True
        return Group(*rows)


def _without_echo_of_controls(file: object) -> Callable[[], None]:
    """Keep the terminal from printing `^C` into the status; what gives it back its way is returned."""
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
    """One line of printable ASCII: what a model wrote may hold anything, escape sequences included."""
    ascii_text = text.encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else " " for char in ascii_text)
