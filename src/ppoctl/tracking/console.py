"""A run in words while it works: a line for each step and each evaluation, and the status of what is going on."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from ppoctl.activity import ACTIVITIES
from ppoctl.clock import duration
from ppoctl.tracking.screen import LogFile, PlainScreen, Screen, plain
from ppoctl.tracking.view import Progress, RunView, key_metrics, number, sparkline

JournalFields = Mapping[str, Any]


class RunConsole:
    """Observer that tells a run to a screen; it may be called from any thread."""

    def __init__(
        self,
        view: RunView,
        screen: Screen,
        *,
        history: Iterable[JournalFields] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Tell from now on; `history` is the journal so far, which is not told again."""
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
        """Hear that a stage runs from now on."""
        with self._lock:
            told = self._report(step - 1)  # said already, unless the step had no update of the actor
            self._view.stage_started(step, stage)
            self._stage_began = self._clock()
            if self._detail == "stages":
                told.append([f"{self._place(step)}  {stage} ..."])
        self._tell(told)

    def on_committed(self, line: JournalFields) -> None:
        """Hear that a stage is committed; `line` is its journal line."""
        with self._lock:
            self._view.committed(line)
            if "stage" not in line:
                return
            step, stage, figures = line["step"], line["stage"], line.get("figures", {})
            told = [[f"{self._place(step)}  {stage} {duration(line['seconds'])}"]] * (self._detail == "stages")
            if stage == self._view.last_stage(step):
                told += self._report(step)
            if stage == "eval" and self._detail != "quiet":
                shown = [
                    f"{name.removeprefix('eval/')} {number(value)}"
                    for name, value in figures.items()
                    if name.endswith("pass_at_1")
                ]
                told.append([self._place(step), "eval", *shown, duration(line["seconds"])])
        self._tell(told)

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        """Hear that a stage which draws has `done` of `total` samples, and drew `tokens` tokens in this attempt."""
        with self._lock:
            self._view.progressed(Progress(done, total, tokens))

    def on_message(self, text: str) -> None:
        """Show one line that is not about a figure: a warning, MLflow's state."""
        self._screen.line(text)

    def on_detail(self, text: str) -> None:
        """Show one line that is for a log, and for who asked for each stage."""
        if self._detail == "stages":
            self._screen.line(text)

    def rows(self, width: int, *, unicode: bool) -> list[Text]:
        """The run in three lines: where it is and how long it takes, what it does now, how rewards went."""
        with self._lock:
            view = self._view
            took = duration(self._clock() - self._began)
            left = f", about {duration(view.eta_s)} left" if view.eta_s else ""
            where = Text.assemble((plain(view.name), "bold"), f"  {self._place(view.at_step)}  {took}{left}")
            rewards = sparkline(list(view.rewards)[-max(width - 8, 1) :], unicode=unicode)
            rows = [where, Text(self._now())]
            return [*rows, Text.assemble(("rewards ", "dim"), rewards)] if rewards else rows

    def in_a_line(self) -> str:
        """Where the run is, and what it does now."""
        with self._lock:
            now = self._now()
            return f"{self._place(self._view.at_step)}  {now}" if now else ""

    def _now(self) -> str:
        """The stage that runs, how far it is, for how long, and at which speed."""
        view, act = self._view, ACTIVITIES.now()
        if view.activity is None:
            return "" if act is None else plain(act.timed())
        words = [view.activity.stage]
        if act is not None:
            words.append(plain(str(act)))
        if view.progress is not None:
            words.append(f"{view.progress.done}/{view.progress.total}")
        words.append(duration(self._clock() - self._stage_began if act is None else act.seconds()))
        if view.progress is not None and view.progress.tokens:
            words.append(f"{number(view.tokens_per_s)} tok/s")
        return "  ".join(words)

    def _place(self, step: int) -> str:
        return f"step {step}/{self._view.steps}"

    def _tell(self, told: list[list[str]]) -> None:
        """Show lines, each of several parts. Not while the lock is held: a screen that redraws itself holds a lock of
        its own while it asks for `rows`, and wants it for a line."""
        for parts in told:
            self._screen.metrics(parts)

    def _report(self, step: int) -> list[list[str]]:
        """The line of a step that is over, once."""
        if step <= self._reported or not self._view.step_figures(step):
            return []
        self._reported = step
        if self._detail == "quiet":
            return []
        view = self._view
        figures = [f"{word} {value}" for word, value in key_metrics(view.step_figures(step))]
        times = [duration(view.step_seconds(step)), f"eta {duration(view.eta_s)}"]
        return [[self._place(step), *figures, f"{number(view.tokens_per_s)} tok/s", *times]]


class RunConsoles:
    """Several consoles that are told the same."""

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
    """The console that writes into a file what a person would see, and each stage; a file that the disk does not take
    stays empty."""
    with contextlib.suppress(OSError):
        path.touch()
    return RunConsole(view, PlainScreen(LogFile(path), "stages", beats=False), history=history)
