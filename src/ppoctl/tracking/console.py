"""The console of `train`: a live panel on a terminal, plain lines anywhere else. It writes to stderr.

A console never fails a run: what a terminal that went away does not take is lost.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ppoctl.clock import duration
from ppoctl.errors import without_secrets
from ppoctl.tracking.view import (
    Progress,
    RunView,
    key_figures,
    number,
    sparkline,
)

Line = Mapping[str, Any]
Clock = Callable[[], float]

GONE = (OSError, ValueError)
"""What writing to a closed terminal or pipe raises; ValueError: the file object itself is closed."""
PROGRESS_EVERY_S = 60.0
"""Seconds between plain lines of a long rollout."""


class TextStream(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


@runtime_checkable
class Console(Protocol):
    """Observer that shows a run to a person; it may be called from any thread."""

    def on_stage_started(self, step: int, stage: str) -> None: ...

    def on_committed(self, line: Line) -> None:
        """Hear that a stage is committed; `line` is its journal line."""
        ...

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        """Hear that the rollout has `done` of `total` samples, and drew `tokens` tokens in this attempt."""
        ...

    def on_message(self, text: str) -> None:
        """Show one line that is not about a figure: a warning, MLflow's state."""
        ...

    def close(self) -> None:
        """Leave the last state on the screen."""
        ...


def open_console(
    view: RunView, *, stream: TextIO | None = None, verbose: bool = False, history: Iterable[Line] = ()
) -> Console:
    """The console that fits the stream (default: stderr). `history` is the journal so far, for a resumed run."""
    stream = stream or sys.stderr
    for line in history:
        view.committed(line)
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return LiveConsole(view, RichConsole(file=stream, highlight=False))
    return PlainConsole(view, stream, verbose=verbose, clock=time.monotonic)


def open_log(view: RunView, path: Path, *, history: Iterable[Line] = ()) -> Console:
    """The console that writes into a file what a person would see, each line with the time of this machine; a file
    that the disk does not take stays empty."""
    for line in history:
        view.committed(line)
    with contextlib.suppress(OSError):
        path.touch()
    return PlainConsole(view, LogFile(path), verbose=True, clock=time.monotonic)


@dataclass(frozen=True)
class LogFile:
    """Stream into a file that is opened for each line: a full disk or a folder that went away costs lines, and no
    more."""

    path: Path

    def write(self, text: str, /) -> int:
        with self.path.open("a", encoding="ascii") as file:
            return file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {without_secrets(text)}")

    def flush(self) -> None:
        """Do nothing: closing the file has done it."""


class Consoles:
    """Several consoles that are told the same."""

    def __init__(self, *consoles: Console) -> None:
        self._consoles = consoles

    def on_stage_started(self, step: int, stage: str) -> None:
        for console in self._consoles:
            console.on_stage_started(step, stage)

    def on_committed(self, line: Line) -> None:
        for console in self._consoles:
            console.on_committed(line)

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        for console in self._consoles:
            console.on_progress(done, total, tokens)

    def on_message(self, text: str) -> None:
        for console in self._consoles:
            console.on_message(text)

    def close(self) -> None:
        for console in self._consoles:
            console.close()


class PlainConsole:
    """Console of one line per step; with `verbose` also one per stage. ASCII without control characters: it ends up
    in logs."""

    def __init__(self, view: RunView, stream: TextStream, *, verbose: bool, clock: Clock) -> None:
        self._view = view
        self._stream = stream
        self._verbose = verbose
        self._clock = clock
        self._told = clock()
        self._reported = view.finished_step
        self._lock = threading.Lock()

    def on_stage_started(self, step: int, stage: str) -> None:
        with self._lock:
            self._told = self._clock()
            self._report(step - 1)  # said already, unless the step had no update of the actor
            self._view.stage_started(step, stage)
            if self._verbose:
                self._write(f"{self._place(step)}  {stage} ...")

    def on_committed(self, line: Line) -> None:
        with self._lock:
            self._view.committed(line)
            if "stage" not in line:
                return
            step, stage, figures = line["step"], line["stage"], line.get("figures", {})
            if self._verbose:
                self._write(f"{self._place(step)}  {stage} {duration(line['seconds'])}")
            if stage == self._view.last_stage(step):
                self._report(step)
            if stage == "eval":
                shown = [
                    f"{name.removeprefix('eval/')} {number(value)}"
                    for name, value in figures.items()
                    if name.endswith("pass_at_1")
                ]
                self._write("  ".join([self._place(step), "eval", *shown]))

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        with self._lock:
            self._view.progressed(Progress(done, total, tokens))
            activity = self._view.activity
            if activity is None or self._clock() - self._told < PROGRESS_EVERY_S:
                return
            self._told = self._clock()
            speed = number(self._view.tokens_per_s)
            self._write(f"{self._place(activity.step)}  {activity.stage} {done}/{total}  {speed} tok/s")

    def on_message(self, text: str) -> None:
        with self._lock:
            self._write(text)

    def close(self) -> None:
        pass

    def _place(self, step: int) -> str:
        return f"step {step}/{self._view.steps}"

    def _report(self, step: int) -> None:
        """Write the line of a step that is over, once."""
        if step <= self._reported or not self._view.step_figures(step):
            return
        self._reported = step
        view = self._view
        figures = [f"{word} {value}" for word, value in key_figures(view.step_figures(step))]
        speed = f"{number(view.tokens_per_s)} tok/s"
        times = [duration(view.step_seconds(step)), f"eta {duration(view.eta_s)}"]
        self._write("  ".join([self._place(step), *figures, speed, *times]))

    def _write(self, text: str) -> None:
        with contextlib.suppress(*GONE):
            self._stream.write(plain(text) + "\n")
            self._stream.flush()


class LiveConsole:
    """Console of a panel that redraws itself; messages appear above it."""

    def __init__(self, view: RunView, console: RichConsole, *, refresh_per_second: float = 4.0) -> None:
        self._view = view
        self._console = console
        self._unicode = console.encoding.startswith("utf")
        self._lock = threading.RLock()
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=refresh_per_second,
            # Rich prints what it redirects to its own console, here stderr: data that someone pipes from stdout
            # must not go there.
            redirect_stdout=sys.stdout.isatty(),
        )
        with contextlib.suppress(*GONE):
            self._live.start()

    def on_stage_started(self, step: int, stage: str) -> None:
        with self._lock:
            self._view.stage_started(step, stage)

    def on_committed(self, line: Line) -> None:
        with self._lock:
            self._view.committed(line)

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        with self._lock:
            self._view.progressed(Progress(done, total, tokens))

    def on_message(self, text: str) -> None:
        with contextlib.suppress(*GONE):
            self._console.print(Text(plain(text)))

    def close(self) -> None:
        with contextlib.suppress(*GONE):
            self._live.stop()

    def _render(self) -> Panel:
        # Called by rich's refresh thread too.
        with self._lock:
            return panel(self._view, unicode=self._unicode)


def panel(view: RunView, *, unicode: bool) -> Panel:
    """The run in four lines: where it is, its figures, how rewards went, how long it takes."""
    activity = view.activity
    step = view.finished_step if activity is None else activity.step
    stage = "" if activity is None else f"  {activity.stage} {duration(view.stage_seconds)}"
    if view.progress is not None:
        stage += f"  {view.progress.done}/{view.progress.total} samples"
    place = Text.assemble((f"step {step}/{view.steps}", "bold"), stage)
    figures = Text("  ").join(Text.assemble((f"{word} ", "dim"), value) for word, value in key_figures(view.figures))
    rewards = Text.assemble(("rewards ", "dim"), sparkline(view.rewards, unicode=unicode))
    speed = Text.assemble(f"{number(view.tokens_per_s)} tok/s  ", ("eta ", "dim"), duration(view.eta_s))
    return Panel(
        Group(place, figures, rewards, speed),
        title=Text(plain(view.name)),
        title_align="left",
        box=box.ROUNDED if unicode else box.ASCII,
    )


def plain(text: str) -> str:
    """One line of printable ASCII: what a model wrote may hold anything, escape sequences included."""
    ascii_text = text.encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else " " for char in ascii_text)
