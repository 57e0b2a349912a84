"""Console of a running run: a line for each step and each evaluation, and a status with the current activity."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from ppoctl.core.activity import ACTIVITIES
from ppoctl.core.clock import duration
from ppoctl.show.tracking.screen import LogFile, PlainScreen, Screen, plain
from ppoctl.show.tracking.view import Progress, RunView, key_metrics, number, sparkline

JournalFields = Mapping[str, Any]


class RunConsole:
    """Observer that shows a run on a screen; it may be called from any thread."""

    def __init__(
        self,
        view: RunView,
        screen: Screen,
        *,
        history: Iterable[JournalFields] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show the run from now on. `history` is the journal so far, which is not shown again."""
        for line in history:
            view.committed(line)
        self._view = view
        self._screen = screen
        self._detail = screen.detail
        self._reported = view.finished_step
        self._lock = threading.RLock()
        self._clock = clock
        self._began = clock()
        self._stage_began = clock()
        screen.follow(self)

    def on_stage_started(self, step: int, stage: str) -> None:
        """Handle the start of a stage."""
        with self._lock:
            lines = self._report(step - 1)  # the line was shown before, unless the step had no actor update
            self._view.stage_started(step, stage)
            self._stage_began = self._clock()
            if self._detail == "stages":
                lines.append([f"{self._step_label(step)}  {stage} ..."])
        self._show(lines)

    def on_committed(self, line: JournalFields) -> None:
        """Handle the commit of a stage; `line` is its journal line."""
        with self._lock:
            self._view.committed(line)
            if "stage" not in line:
                return
            step, stage, metrics = line["step"], line["stage"], line.get("figures", {})
            lines = [[f"{self._step_label(step)}  {stage} {duration(line['seconds'])}"]] * (self._detail == "stages")
            if stage == self._view.last_stage(step):
                lines += self._report(step)
            if stage == "eval" and self._detail != "quiet":
                shown = [
                    f"{name.removeprefix('eval/')} {number(value)}"
                    for name, value in metrics.items()
                    if name.endswith("pass_at_1")
                ]
                lines.append([self._step_label(step), "eval", *shown, duration(line["seconds"])])
        self._show(lines)

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        """Handle the progress of generation: `done` of `total` samples, and `tokens` tokens in this attempt."""
        with self._lock:
            self._view.progressed(Progress(done, total, tokens))

    def on_message(self, text: str) -> None:
        """Show a line that is not about a metric, such as a warning or the state of MLflow."""
        self._screen.line(text)

    def on_detail(self, text: str) -> None:
        """Show a line that is only for logs and for screens that show each stage."""
        if self._detail == "stages":
            self._screen.line(text)

    def rows(self, width: int, *, unicode: bool) -> list[Text]:
        """Return the run in three lines: its step and times, its current activity, and its recent rewards."""
        with self._lock:
            view = self._view
            took = duration(self._clock() - self._began)
            left = f", about {duration(view.eta_s)} left" if view.eta_s else ""
            position = Text.assemble((plain(view.name), "bold"), f"  {self._step_label(view.at_step)}  {took}{left}")
            rewards = sparkline(view.rewards[-max(width - 8, 1) :], unicode=unicode)
            rows = [position, Text(self._now())]
            return [*rows, Text.assemble(("rewards ", "dim"), rewards)] if rewards else rows

    def in_a_line(self) -> str:
        """Return the run's step and its current activity in one line; empty if there is no activity."""
        with self._lock:
            now = self._now()
            return f"{self._step_label(self._view.at_step)}  {now}" if now else ""

    def _now(self) -> str:
        """Return the current stage with its progress, duration and speed."""
        view, activity = self._view, ACTIVITIES.now()
        if view.activity is None:
            return "" if activity is None else plain(activity.timed())
        words = [view.activity.stage]
        if activity is not None:
            words.append(plain(str(activity)))
        if view.progress is not None:
            words.append(f"{view.progress.done}/{view.progress.total}")
        words.append(duration(self._clock() - self._stage_began if activity is None else activity.seconds()))
        if view.progress is not None and view.progress.tokens:
            words.append(f"{number(view.tokens_per_s)} tok/s")
        return "  ".join(words)

    def _step_label(self, step: int) -> str:
        return f"step {step}/{self._view.steps}"

    def _show(self, lines: list[list[str]]) -> None:
        """Show lines, each a list of parts. The caller must not hold the lock of this console.

        A live screen holds its own lock while it calls `rows`, and takes the same lock to show a line. If the caller
        held the console's lock, the two threads would deadlock.
        """
        for parts in lines:
            self._screen.metrics(parts)

    def _report(self, step: int) -> list[list[str]]:
        """Return the line of a finished step, or an empty list if the line was returned before."""
        if step <= self._reported or not self._view.step_figures(step):
            return []
        self._reported = step
        if self._detail == "quiet":
            return []
        view = self._view
        metrics = [f"{word} {value}" for word, value in key_metrics(view.step_figures(step))]
        times = [duration(view.step_seconds(step)), f"eta {duration(view.eta_s)}"]
        return [[self._step_label(step), *metrics, f"{number(view.tokens_per_s)} tok/s", *times]]


class RunConsoles:
    """Several consoles that receive the same events."""

    def __init__(self, *consoles: RunConsole) -> None:
        self._consoles = consoles

    def on_stage_started(self, step: int, stage: str) -> None:
        for console in self._consoles:
            console.on_stage_started(step, stage)

    def on_committed(self, line: JournalFields) -> None:
        for console in self._consoles:
            console.on_committed(line)

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        for console in self._consoles:
            console.on_progress(done, total, tokens)

    def on_message(self, text: str) -> None:
        for console in self._consoles:
            console.on_message(text)

    def on_detail(self, text: str) -> None:
        for console in self._consoles:
            console.on_detail(text)


def open_log(view: RunView, path: Path, *, history: Iterable[JournalFields] = ()) -> RunConsole:
    """Return a console that writes the lines of a terminal, and a line for each stage, into a file.

    If the disk rejects the file, the lines are lost without an error.
    """
    with contextlib.suppress(OSError):
        path.touch()
    return RunConsole(view, PlainScreen(LogFile(path), "stages", beats=False), history=history)
