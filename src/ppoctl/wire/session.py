"""One attempt on one run: claim it, watch it, run it, and leave a true word about how it ended."""

import os
import platform
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from ppoctl.errors import (
    ExitCode,
    FinishedShortError,
    HealthStopError,
    InterruptedByUserError,
    OutOfMemoryError,
    PpoctlError,
    PreemptedError,
    RecipeError,
    StorageError,
)
from ppoctl.launch.signals import StopFlag, stop_flag
from ppoctl.loop.expectations import Verdict, judge
from ppoctl.loop.run import Job, run
from ppoctl.preflight import check as preflight
from ppoctl.recipe.load import from_resolved
from ppoctl.recipe.schema import MlflowTracking, Recipe
from ppoctl.recipe.write import recipe_as_toml
from ppoctl.rewards.probe import probe, require_gold_wins
from ppoctl.rewards.processes import ProcessScorer
from ppoctl.store import artifact, run_dir
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.journal import Journal, Line
from ppoctl.store.layout import RunLayout
from ppoctl.store.once import Observer
from ppoctl.tracking.console import Console, open_console
from ppoctl.tracking.health import HealthMonitor, figures_by_step
from ppoctl.tracking.mirror import MlflowMirror
from ppoctl.wire import engines
from ppoctl.wire.job import Surroundings, assemble
from ppoctl.wire.sockets import Sockets
from ppoctl.wire.sources import source_digests
from ppoctl.wire.versions import versions

MIRROR_DEADLINE_S = 20.0
"""How long the end of a run waits for MLflow."""

Plug = Callable[[Recipe, Mapping[str, str]], Sockets]
"""(recipe, source digests) -> sockets; tests plug fakes in here."""


@dataclass(frozen=True)
class Ended:
    """How a run stands after an attempt that ended in order."""

    layout: RunLayout
    lines: list[Line]
    verdicts: list[Verdict]


@dataclass
class Watcher:
    """Hands what happens to the console and wakes the mirror."""

    console: Console
    mirror: MlflowMirror | None
    stage: tuple[int, str] = (0, "start")

    def on_stage(self, step: int, stage: str) -> None:
        self.stage = (step, stage)
        self.console.on_stage_started(step, stage)

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        pass

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        self.console.on_progress(done, total, tokens)

    def on_committed(self, line: Line) -> None:
        self.console.on_committed(line)
        if self.mirror is not None:
            self.mirror.notify()


@dataclass(frozen=True)
class Opened:
    """A run directory and what its sources are, ready for an attempt."""

    layout: RunLayout
    recipes: Mapping[int, Recipe]
    sockets: Sockets
    threads: int
    observers: tuple[Observer, ...] = ()
    verbose: bool = False

    @property
    def recipe(self) -> Recipe:
        return self.recipes[max(self.recipes)]


def prepare(recipe: Recipe) -> tuple[Sockets, dict[str, str], int]:
    """Everything that can be wrong with the recipe's sources is found here, before a run directory is made.

    Returns the sockets, the digests of the sources, and the CPU threads in force.
    """
    preflight.require(recipe)
    threads = engines.set_threads(recipe)
    questions = engines.read_questions(recipe)
    digests = source_digests(recipe, questions)
    scorer = engines.open_scorer(recipe, questions)
    try:
        sockets = engines.plug_in(recipe, questions, scorer, model_digest=digests["model"])
    except BaseException:
        scorer.close()
        raise
    return sockets, digests, threads


def create(layout: RunLayout, recipe: Recipe, digests: Mapping[str, str], *, command: str) -> None:
    """Make the run directory of a new run."""
    run_dir.create(
        layout,
        recipe_toml=recipe_as_toml(recipe),
        resolved=recipe.model_dump(mode="json", by_alias=True),
        facts={"sources": dict(digests), "versions": versions(), "command": command},
    )


def recorded_recipes(layout: RunLayout) -> dict[int, Recipe]:
    """The run's recipes by the first step they hold for."""
    return {start: from_resolved(resolved) for start, resolved in run_dir.recipes(layout).items()}


def attempt_run(opened: Opened, do: Callable[[Job], None] = run) -> Ended:
    """Run what is left. Raises the error that stopped it; the journal then has the attempt's end and exit code.

    Health rules are judged over the recorded steps again, so a rule's count of consecutive steps survives a resume.
    """
    layout, recipe = opened.layout, opened.recipe
    attempt = claim(layout)
    artifact.sweep(layout)
    journal = Journal(layout, attempt)
    journal.event("attempt_started", pid=os.getpid(), host=platform.node(), threads=opened.threads)
    with stop_flag() as flag, _watched(opened, journal) as watcher, _ending(journal, attempt, watcher) as word:
        wiring = assemble(layout, attempt, opened.recipes, opened.sockets, _around(opened, watcher, flag, journal))
        if watcher.mirror is not None:
            watcher.mirror.start()
        try:
            do(wiring.job)
        finally:
            wiring.close()
        verdicts = judge(recipe.expect, journal.lines()) if do is run else []
        if not all(verdict.met for verdict in verdicts):
            word.exit_code = ExitCode.HEALTH  # the caller shows the table, then raises ExpectationError
    return Ended(layout, journal.lines(), verdicts)


def _around(opened: Opened, watcher: Watcher, flag: StopFlag, journal: Journal) -> Surroundings:
    health = HealthMonitor(opened.recipe.health)
    steps = figures_by_step(journal.lines(), before=1 + max(opened.layout.saved_steps("actor"), default=0))
    health.replay(steps)
    return Surroundings(
        check_stop=flag.check,
        say=watcher.console.on_message,
        observers=(watcher, *opened.observers),
        health=health,
        versions=versions(),
    )


@contextmanager
def _watched(opened: Opened, journal: Journal) -> Iterator[Watcher]:
    console = open_console(opened.recipe.name, opened.recipe.steps, verbose=opened.verbose, history=journal.lines())
    mirror = None
    tracking = opened.recipe.tracking
    if isinstance(tracking, MlflowTracking):
        mirror = MlflowMirror(opened.layout.root, tracking, opened.layout.root.parent, say=console.on_message)
    try:
        yield Watcher(console, mirror)
    finally:
        console.close()


@dataclass
class LastWord:
    """How an attempt that came to its end will be written down."""

    exit_code: ExitCode = ExitCode.DONE


@contextmanager
def _ending(journal: Journal, attempt: Attempt, watcher: Watcher) -> Iterator[LastWord]:
    """Write down how the attempt ended, whatever ended it."""
    status, code = "failed", int(ExitCode.INTERNAL)
    word = LastWord()
    try:
        try:
            yield word
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise _out_of_memory(watcher.stage, error) from error
        status, code = "finished", int(word.exit_code)
    except PpoctlError as error:
        status, code = _status(error), int(error.exit_code)
        raise
    except BaseException:
        with suppress(OSError):
            path = attempt.layout.attempt(attempt.number) / "traceback.txt"
            path.write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        # A full disk or a vanished folder must not hide the error that is on its way.
        with suppress(StorageError):
            journal.event("attempt_ended", status=status, exit_code=code)
        if watcher.mirror is not None:
            watcher.mirror.close(status, MIRROR_DEADLINE_S)


def _status(error: PpoctlError) -> str:
    words = {
        PreemptedError: "preempted",
        InterruptedByUserError: "interrupted",
        HealthStopError: "stopped",
        FinishedShortError: "short",
    }
    return next((word for kind, word in words.items() if isinstance(error, kind)), "failed")


def _out_of_memory(stage: tuple[int, str], error: BaseException) -> OutOfMemoryError:
    step, name = stage
    key = {"critic_update": "critic.batching", "values": "critic.batching", "rollout": "generator"}.get(
        name, "actor.batching"
    )
    return OutOfMemoryError(
        f"out of memory in stage `{name}` of step {step}: {str(error).splitlines()[0] if str(error) else 'host'}",
        hint=f"everything before it is committed: resume with a lower `{key}.max_tokens_per_microbatch` or KV cache",
    )


def require_same_model(layout: RunLayout, recipe: Recipe) -> None:
    """Raise RecipeError when a resume asks for another model: that would be another run."""
    first = recorded_recipes(layout)[1]
    if recipe.model != first.model:
        raise RecipeError(
            f"`model` is `{recipe.model.path}` ({recipe.model.dtype}) and the run was made from `{first.model.path}` "
            f"({first.model.dtype})",
            hint="start a new run with another `name`",
        )


def probe_reward(recipe: Recipe) -> list[str]:
    """What the scorer says to gold, wrong, empty and truncated answers, a line per row; raises RewardError when gold
    does not win."""
    questions = engines.read_questions(recipe)
    scorer = ProcessScorer.of(recipe.reward)
    try:
        probed = probe(scorer.pool, recipe.reward, questions.train[: engines.PROBED_ROWS])
    finally:
        scorer.close()
    require_gold_wins(probed)
    return [f"{row.id}: {row.describe()}" for row in probed]
