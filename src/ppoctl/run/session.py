"""One attempt on a run: claim the run, observe it, run it, and record how the attempt ended."""

import os
import platform
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import torch

from ppoctl.core.clock import WORK
from ppoctl.core.errors import (
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
from ppoctl.core.machine.versions import versions
from ppoctl.recipe.cadence import evaluates
from ppoctl.recipe.loading.capabilities import require_capable
from ppoctl.recipe.paths import resolved_uri
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.run import mlflow_extras
from ppoctl.run.given_resources import add_what_to_do, allotted, out_of_memory, time_left
from ppoctl.run.loop.steps import RunContext, ended_early, last_saved, run
from ppoctl.run.shutdown.signals import SignalGate, signal_gate
from ppoctl.run.wire import engines
from ppoctl.run.wire.components import Components
from ppoctl.run.wire.run_context import RunHooks, assemble
from ppoctl.run.wire.sources import source_digests
from ppoctl.show.report.expectations import RunResult, check_expectations
from ppoctl.show.tracking.console import RunConsole, RunConsoles, open_log
from ppoctl.show.tracking.event_file import TensorBoardMirror
from ppoctl.show.tracking.health import HealthMonitor
from ppoctl.show.tracking.library_output import LIBRARY_OUTPUT
from ppoctl.show.tracking.mirror import MlflowMirror
from ppoctl.show.tracking.screen import Screen, open_screen
from ppoctl.show.tracking.view import RunView
from ppoctl.start.preflight import check as preflight
from ppoctl.store import artifact
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.disk_errors import refused
from ppoctl.store.jobs import resume_command
from ppoctl.store.journal import Journal, JournalLine
from ppoctl.store.liveness import EARLY_END
from ppoctl.store.outline import Outlines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import ResumePlan
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import Observer
from ppoctl.store.states import States
from ppoctl.store.stop_request import stop_requested

MIRROR_DEADLINE_S = 20.0
"""Maximum number of seconds that a run waits for MLflow at its end."""
MIRROR_AFTER_S = 60.0
"""Seconds from the start of the attempt after which the mirror starts, even if the first step has not ended."""


@dataclass
class AttemptObserver:
    """Passes events to the console, updates the event file for TensorBoard, and wakes the MLflow mirror."""

    console: RunConsoles
    mirror: MlflowMirror | None
    tensorboard: TensorBoardMirror | None
    ends_step: Callable[[JournalLine], bool]
    """Whether a line of the journal is the last line of its step."""
    stage: tuple[int, str] = (0, "start")
    unkept_since: float | None = None
    """Time on the work clock since which nothing of the running stage was kept; None: no stage is running."""
    replayed_s: float = 0.0
    began: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), WORK.now()))
    """Start of the attempt in seconds, by the monotonic clock and by the work clock."""
    mirror_started: bool = False
    exit_code: ExitCode = ExitCode.DONE
    """Exit code that the journal records for an attempt that ended without an error."""
    early_end: str | None = None
    """Values that ended the run before its last step; None: the run did not end, or all steps are done."""

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
        if self.tensorboard is not None:
            self.tensorboard.update()
        if line["step"] > 0 and (self.ends_step(line) or time.monotonic() - self.began[0] > MIRROR_AFTER_S):
            self.start_mirror()
        if self.mirror is not None and self.mirror_started:
            self.mirror.notify()

    @contextmanager
    def counting_replays(self, states: States) -> Iterator[None]:
        """Context of a run's work. The context records the seconds of replays, even if the work fails."""
        try:
            yield
        finally:
            self.replayed_s = states.replayed_s

    def lost(self) -> dict[str, float]:
        """Return the seconds of the attempt that are in no committed stage: startup, replays, and work that was not
        committed."""
        still_s = (time.monotonic() - self.began[0]) - (WORK.now() - self.began[1])
        abandoned_s = 0.0 if self.unkept_since is None else WORK.now() - self.unkept_since
        starting_s = max(still_s - self.replayed_s, 0.0)
        return {"starting_s": starting_s, "replayed_s": self.replayed_s, "abandoned_s": abandoned_s}

    def start_mirror(self) -> None:
        """Start the mirror of this attempt in MLflow, if it has not started.

        The mirror starts only after a rollout: a run that failed before its first rollout may be replaced, and must
        leave nothing in MLflow. The mirror waits for the first step to end, because its imports would slow down the
        first step of a short run.
        """
        if self.mirror is not None and not self.mirror_started:
            self.mirror_started = True
            self.mirror.start()


@dataclass(frozen=True)
class OpenedRun:
    """Run directory with its components, ready for an attempt."""

    paths: RunPaths
    recipes: Mapping[int, Recipe]
    components: Components
    plan: ResumePlan
    """Resume plan that was made when the run was opened."""
    observers: tuple[Observer, ...] = ()
    notes: tuple[str, ...] = ()
    """Messages that are printed first."""
    attempt: Attempt | None = None
    """Attempt that is already claimed; None: not claimed yet."""

    @property
    def recipe(self) -> Recipe:
        return self.recipes[max(self.recipes)]


def prepare(recipe: Recipe, clock: datetime, *, is_profiled: bool = False) -> tuple[Components, dict[str, str]]:
    """Return the components of a run and the digests of its sources. `clock` is the local time of the creation of the
    run. With `is_profiled`, engines record a profile.

    All problems with the components and sources are raised here, before a run directory is created.
    """
    if isinstance(recipe.tracking, MlflowTracking):
        resolved_uri(recipe.tracking.uri)
    require_capable(recipe)
    preflight.require(recipe)
    engines.set_threads(recipe)
    prompt_source = engines.read_prompts(recipe, clock)
    digests = source_digests(recipe, prompt_source)
    return engines.open_engines(recipe, prompt_source, digests, is_profiled=is_profiled), digests


def attempt_run(
    opened: OpenedRun,
    do: Callable[[RunContext], None] = run,
    gate: SignalGate | None = None,
    screen: Screen | None = None,
) -> RunResult:
    """Run the remaining steps. Raises the error that stopped the run; the journal then has the attempt's end and exit
    code.

    `gate` and `screen` are the objects that the command created when it started; None: create them. Health rules
    check the recorded steps again, so a rule's count of consecutive steps survives a resume.
    """
    resume_hint = resume_command(opened.paths.root)
    if gate is None:
        with open_screen() as own_screen, signal_gate(resume_hint, own_screen.line) as own_gate:
            return attempt_run(opened, do, own_gate, own_screen)
    assert screen is not None
    gate.is_resumable = resume_hint
    paths, recipe = opened.paths, opened.recipe
    attempt = opened.attempt or claim(paths)
    artifact.sweep(attempt)
    recorded = RecordedRun(paths)
    journal, outlines = Journal(paths, attempt), recorded.outlines
    this_process = {"pid": os.getpid(), "host": platform.node(), "threads": torch.get_num_threads()}
    journal.event("attempt_started", **this_process, **allotted(recipe))
    # The attempt closes last: everything inside it may still write to the run.
    with (
        closing(attempt),
        _watched(opened, screen, outlines, attempt, journal) as watcher,
        _ending(recipe, journal, outlines, attempt, watcher),
        gate.outlasting(),
        closing(opened.components),
    ):
        hooks = RunHooks(
            gate=gate,
            notify=watcher.console.on_message,
            log=watcher.console.on_detail,
            observers=(watcher, *opened.observers),
            health=HealthMonitor(recipe.health),
            versions=versions(),
            verified=opened.plan.verified,
        )
        job, generator = assemble(paths, attempt, opened.recipes, opened.components, hooks)
        for note in opened.notes:
            watcher.console.on_message(note)
        if recorded.has_begun():
            watcher.start_mirror()
        with (
            closing(generator),
            gate.working(time_left(job), partial(stop_requested, paths, attempt.number)),
            watcher.counting_replays(job.states),
        ):
            if do is run:
                opened.components.prestart()
            do(job)
        results = check_expectations(recipe.expect, journal.lines()) if do is run else []
        watcher.early_end = ended_early(job, last_saved(job)) if do is run else None
        if not all(result.met for result in results):
            watcher.exit_code = ExitCode.HEALTH  # the caller prints the table, then raises ExpectationError
    return RunResult(paths, journal.lines(), results, watcher.early_end)


@contextmanager
def _watched(
    opened: OpenedRun, screen: Screen, outlines: Outlines, attempt: Attempt, journal: Journal
) -> Iterator[AttemptObserver]:
    recipe, history = opened.recipe, journal.lines()
    views = [
        RunView(
            recipe.name,
            recipe.steps,
            lambda step: outlines.at(step).last,
            evaluates=lambda step: evaluates(recipe, step),
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
        hooks = mlflow_extras.around(opened.paths, console.on_message)
        mirror = MlflowMirror(opened.paths.root, tracking, attempt=attempt.number, around=hooks)
    tensorboard = TensorBoardMirror(opened.paths, console.on_message) if tracking.tensorboard else None
    try:
        yield AttemptObserver(
            console, mirror, tensorboard, lambda line: line["stage"] == outlines.at(line["step"]).last
        )
    except BaseException as error:
        # The command prints the error only after everything is closed, so it is logged here; otherwise no file of the
        # run would contain it.
        message = error.message if isinstance(error, PpoctlError) else f"{type(error).__name__}: {error}"
        hint = f"hint: {error.hint}" if isinstance(error, PpoctlError) and error.hint else ""
        for text in (*(f"error: {line}" for line in message.splitlines()), *hint.splitlines()):
            log.on_message(text)
        raise


@contextmanager
def _ending(
    recipe: Recipe, journal: Journal, outlines: Outlines, attempt: Attempt, watcher: AttemptObserver
) -> Iterator[None]:
    """Record how the attempt ended, even after an unexpected error."""
    status, code = "failed", int(ExitCode.INTERNAL)
    try:
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            outline = outlines.at(watcher.stage[0])
            raise out_of_memory(attempt.paths.root, recipe, outline, watcher.stage, error) from error
        except OSError as error:
            if (named := refused(error)) is not None:
                raise named from error
            raise
        status, code = ("unmet" if watcher.exit_code else "finished"), int(watcher.exit_code)
    except PpoctlError as error:
        if isinstance(error, StorageError):
            add_what_to_do(error, attempt.paths, recipe)
        name_the_run(error, attempt.paths)
        status, code = _status(error), int(error.exit_code)
        raise
    except BaseException:
        with suppress(OSError):
            path = attempt.paths.attempt(attempt.number) / "traceback.txt"
            path.write_text(without_secrets(traceback.format_exc()), encoding="utf-8")
        raise
    finally:
        # A full disk or a missing folder must not hide the error that is being raised.
        with suppress(StorageError):
            early = {} if watcher.early_end is None else {EARLY_END: watcher.early_end}
            during = {} if watcher.unkept_since is None else {"during": list(watcher.stage)}
            journal.event("attempt_ended", status=status, exit_code=code, **early, **during, **watcher.lost())
        # After the line of the journal, from which both mirrors read the status.
        if watcher.tensorboard is not None:
            watcher.tensorboard.update()
        if watcher.mirror is not None:
            watcher.mirror.close(status, MIRROR_DEADLINE_S)


def name_the_run(error: PpoctlError, paths: RunPaths) -> None:
    """Replace RUN and RECIPE in the hint of an error. Lower packages write these words, because they do not know the
    run."""
    if error.hint is not None:
        hint = re.sub(r"\bRECIPE\b", lambda _: quoted(paths.recipe_toml), error.hint)
        error.hint = re.sub(
            r"(ppoctl resume )?\bRUN\b",
            lambda at: resume_command(paths.root) if at[1] else quoted(paths.root),
            hint,
        )


def _status(error: PpoctlError) -> str:
    names = {
        PreemptedError: "preempted",
        InterruptedByUserError: "interrupted",
        HealthStopError: "stopped",
        FinishedShortError: "short",
        SupersededError: "superseded",
    }
    return next((name for kind, name in names.items() if isinstance(error, kind)), "failed")
