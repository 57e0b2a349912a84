"""One attempt on one run: claim it, watch it, run it, and leave a true word about how it ended."""

import os
import platform
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from ppoctl.clock import WORK
from ppoctl.errors import (
    ExitCode,
    FinishedShortError,
    HealthStopError,
    InterruptedByUserError,
    PpoctlError,
    PreemptedError,
    StorageError,
    SupersededError,
    quoted,
    without_secrets,
)
from ppoctl.loading.capabilities import require_capable
from ppoctl.loading.rules.across_tables import notes_on
from ppoctl.loop.expectations import RunResult, check_expectations
from ppoctl.loop.run import RunContext, run
from ppoctl.machine.versions import versions
from ppoctl.preflight import check as preflight
from ppoctl.recipe.cadence import evaluates
from ppoctl.recipe.paths import resolved_uri
from ppoctl.recipe.schema import MlflowTracking, Recipe
from ppoctl.runs import mlflow_extras
from ppoctl.runs.resource_errors import add_what_to_do, out_of_memory
from ppoctl.runs.resources import allotted, time_left
from ppoctl.shutdown.signals import SignalGate, signal_gate
from ppoctl.store import artifact, run_dir
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.disk import refused
from ppoctl.store.jobs import resume_command
from ppoctl.store.journal import Journal, JournalLine
from ppoctl.store.outline import Outlines, outlines_of
from ppoctl.store.resume_plan import ResumePlan
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import Observer
from ppoctl.store.states import States
from ppoctl.store.stop_request import stop_requested
from ppoctl.tracking.console import RunConsole, RunConsoles, open_log
from ppoctl.tracking.health import HealthMonitor
from ppoctl.tracking.library_output import LIBRARY_OUTPUT
from ppoctl.tracking.mirror import MlflowMirror
from ppoctl.tracking.screen import Screen, open_screen
from ppoctl.tracking.view import RunView
from ppoctl.wire import engines
from ppoctl.wire.components import Components
from ppoctl.wire.run_context import RunHooks, assemble
from ppoctl.wire.sources import source_digests

MIRROR_DEADLINE_S = 20.0
"""How long the end of a run waits for MLflow."""
MIRROR_AFTER_S = 60.0
"""How long MLflow waits for the end of the first step, from the start of the attempt."""


@dataclass
class AttemptObserver:
    """Hands what happens to the console and wakes the mirror."""

    console: RunConsoles
    mirror: MlflowMirror | None
    ends_step: Callable[[JournalLine], bool]
    """Whether a line of the journal is the last of its step."""
    stage: tuple[int, str] = (0, "start")
    unkept_since: float | None = None
    """Time by the clock of work since which nothing of the running stage was kept; None: none runs."""
    replayed_s: float = 0.0
    began: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), WORK.now()))
    """Start of the attempt in seconds, by the clock on the wall and by that of work."""
    mirror_started: bool = False
    exit_code: ExitCode = ExitCode.DONE
    """How an attempt that came to its end is written down."""

    def on_stage(self, step: int, stage: str) -> None:
        self.stage, self.unkept_since = (step, stage), WORK.now()
        self.console.on_stage_started(step, stage)

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        pass

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        self.unkept_since = WORK.now()
        self.console.on_progress(done, total, tokens)

    def on_committed(self, line: JournalLine) -> None:
        self.unkept_since = None
        self.console.on_committed(line)
        if line["step"] > 0 and (self.ends_step(line) or time.monotonic() - self.began[0] > MIRROR_AFTER_S):
            self.start_mirror()
        if self.mirror is not None and self.mirror_started:
            self.mirror.notify()

    @contextmanager
    def counting_replays(self, states: States) -> Iterator[None]:
        """Around the work of a run: how long it replayed is known afterwards, however it ended."""
        try:
            yield
        finally:
            self.replayed_s = states.replayed_s

    def lost(self) -> dict[str, float]:
        """Seconds of the attempt that no stage of the run has: starts, replays, and what was not committed."""
        still_s = (time.monotonic() - self.began[0]) - (WORK.now() - self.began[1])
        abandoned_s = 0.0 if self.unkept_since is None else WORK.now() - self.unkept_since
        starting_s = max(still_s - self.replayed_s, 0.0)
        return {"starting_s": starting_s, "replayed_s": self.replayed_s, "abandoned_s": abandoned_s}

    def start_mirror(self) -> None:
        """MLflow hears of a run once it has a rollout: a start that failed is replaced, and leaves nothing there. Its
        imports would slow the first step of a short run down, and wait for its end."""
        if self.mirror is not None and not self.mirror_started:
            self.mirror_started = True
            self.mirror.start()


@dataclass(frozen=True)
class OpenedRun:
    """A run directory and what its sources are, ready for an attempt."""

    paths: RunPaths
    recipes: Mapping[int, Recipe]
    sockets: Components
    plan: ResumePlan
    """What was found when the run was opened."""
    observers: tuple[Observer, ...] = ()
    notes: tuple[str, ...] = ()
    """What is said first."""
    attempt: Attempt | None = None
    """Claimed already; None: it is still to be."""

    @property
    def recipe(self) -> Recipe:
        return self.recipes[max(self.recipes)]


def prepare(recipe: Recipe) -> tuple[Components, dict[str, str]]:
    """The sockets, and the digests of the sources. Everything that can be wrong with these is found here, before a
    run directory is made."""
    if isinstance(recipe.tracking, MlflowTracking):
        resolved_uri(recipe.tracking.uri)
    require_capable(recipe)
    preflight.require(recipe)
    engines.set_threads(recipe)
    questions = engines.read_questions(recipe)
    digests = source_digests(recipe, questions)
    return engines.open_engines(recipe, questions, digests), digests


def attempt_run(
    opened: OpenedRun,
    do: Callable[[RunContext], None] = run,
    gate: SignalGate | None = None,
    screen: Screen | None = None,
) -> RunResult:
    """Run what is left. Raises the error that stopped it; the journal then has the attempt's end and exit code.
    `gate` and `screen`: those that have been there since the command began; without: its own.

    Health rules are judged over the recorded steps again, so a rule's count of consecutive steps survives a resume.
    """
    goes_on = resume_command(opened.paths.root)
    if gate is None:
        with open_screen() as shown, signal_gate(goes_on, shown.line) as own:
            return attempt_run(opened, do, own, shown)
    assert screen is not None
    gate.goes_on = goes_on
    layout, recipe = opened.paths, opened.recipe
    attempt = opened.attempt or claim(layout)
    artifact.sweep(attempt)
    journal, told = Journal(layout, attempt), outlines_of(layout)
    this_process = {"pid": os.getpid(), "host": platform.node(), "threads": torch.get_num_threads()}
    journal.event("attempt_started", **this_process, **allotted(recipe))
    with (
        closing(attempt),
        _watched(opened, screen, told, attempt, journal) as watcher,
        _ending(recipe, journal, told, attempt, watcher),
        gate.outlasting(),
        closing(opened.sockets),
    ):
        around = RunHooks(
            gate=gate,
            notify=watcher.console.on_message,
            log=watcher.console.on_detail,
            observers=(watcher, *opened.observers),
            health=HealthMonitor(recipe.health),
            versions=versions(),
            verified=opened.plan.verified,
        )
        job, generator = assemble(layout, attempt, opened.recipes, opened.sockets, around)
        for note in (*opened.notes, *(f"note: {text}" for text in notes_on(recipe))):
            watcher.console.on_message(note)
        if run_dir.has_begun(layout):
            watcher.start_mirror()
        with (
            closing(generator),
            gate.working(time_left(layout, told, job.journal), partial(stop_requested, layout, attempt.number)),
            watcher.counting_replays(job.states),
        ):
            if do is run:
                opened.sockets.prestart()
            do(job)
        verdicts = check_expectations(recipe.expect, journal.lines()) if do is run else []
        if not all(verdict.met for verdict in verdicts):
            watcher.exit_code = ExitCode.HEALTH  # the caller shows the table, then raises ExpectationError
    return RunResult(layout, journal.lines(), verdicts)


@contextmanager
def _watched(
    opened: OpenedRun, screen: Screen, told: Outlines, attempt: Attempt, journal: Journal
) -> Iterator[AttemptObserver]:
    recipe, history = opened.recipe, journal.lines()
    views = [
        RunView(
            recipe.name, recipe.steps, lambda step: told.at(step).last, evaluates=lambda step: evaluates(recipe, step)
        )
        for _ in range(2)
    ]
    log = open_log(views[0], opened.paths.console_log(attempt.number), history=history)
    LIBRARY_OUTPUT.into(opened.paths.attempt(attempt.number) / "libraries.log")
    log.on_message(f"attempt {attempt.number} on {platform.node()}, process {os.getpid()}")
    console = RunConsoles(log, RunConsole(views[1], screen, history=history))
    mirror = None
    tracking = recipe.tracking
    if isinstance(tracking, MlflowTracking):
        given = mlflow_extras.around(opened.paths, console.on_message)
        mirror = MlflowMirror(opened.paths.root, tracking, attempt=attempt.number, around=given)
    try:
        yield AttemptObserver(console, mirror, lambda line: line["stage"] == told.at(line["step"]).last)
    except BaseException as error:
        # The command shows it when all is closed; what it says by then is in no file of the run.
        says = error.message if isinstance(error, PpoctlError) else f"{type(error).__name__}: {error}"
        hint = f"hint: {error.hint}" if isinstance(error, PpoctlError) and error.hint else ""
        for text in (*(f"error: {line}" for line in says.splitlines()), *hint.splitlines()):
            log.on_message(text)
        raise


@contextmanager
def _ending(
    recipe: Recipe, journal: Journal, told: Outlines, attempt: Attempt, watcher: AttemptObserver
) -> Iterator[None]:
    """Write down how the attempt ended, whatever ended it."""
    status, code = "failed", int(ExitCode.INTERNAL)
    try:
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            outline = told.at(watcher.stage[0])
            raise out_of_memory(attempt.paths.root, recipe, outline, watcher.stage, error) from error
        except OSError as error:
            if (named := refused(error)) is not None:
                raise named from error
            raise
        status, code = ("unmet" if watcher.exit_code else "finished"), int(watcher.exit_code)
    except PpoctlError as error:
        if isinstance(error, StorageError):
            add_what_to_do(error, attempt.paths, recipe)
        if error.hint is not None:  # of rooms that do not know which run they work for
            root = attempt.paths.root
            error.hint = re.sub(
                r"(ppoctl resume )?\bRUN\b", lambda at: resume_command(root) if at[1] else quoted(root), error.hint
            )
        status, code = _status(error), int(error.exit_code)
        raise
    except BaseException:
        with suppress(OSError):
            path = attempt.paths.attempt(attempt.number) / "traceback.txt"
            path.write_text(without_secrets(traceback.format_exc()), encoding="utf-8")
        raise
    finally:
        # A full disk or a vanished folder must not hide the error that is on its way.
        with suppress(StorageError):
            journal.event("attempt_ended", status=status, exit_code=code, **watcher.lost())
        if watcher.mirror is not None:
            watcher.mirror.close(status, MIRROR_DEADLINE_S)


def _status(error: PpoctlError) -> str:
    words = {
        PreemptedError: "preempted",
        InterruptedByUserError: "interrupted",
        HealthStopError: "stopped",
        FinishedShortError: "short",
        SupersededError: "superseded",
    }
    return next((word for kind, word in words.items() if isinstance(error, kind)), "failed")
