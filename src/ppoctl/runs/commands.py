"""What `train`, `resume`, `rollout` and `eval` do, once the command line is parsed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from ppoctl.batch.prompts import Prompts
from ppoctl.batch.records import Evaluation, State
from ppoctl.errors import RecipeError, RunExistsError, quoted
from ppoctl.loading.as_written import paths_as_written
from ppoctl.loading.load import Loaded
from ppoctl.loop.expectations import RunResult
from ppoctl.loop.run import RunContext, run, start_point
from ppoctl.loop.step_functions import StepInputs
from ppoctl.ports import Actor, Sample, SampleSetKey
from ppoctl.preflight import check as preflight
from ppoctl.recipe.schema import Recipe
from ppoctl.runs import changed_settings, session
from ppoctl.runs.eval_target import Checkpoint
from ppoctl.runs.new_run import (
    ROLLOUT,
    TRAIN,
    create,
    draws_or_scores,
    holds_only_rollouts,
    is_replaceable,
    require_way,
)
from ppoctl.runs.run_recipe import recipe_of, recorded_recipes
from ppoctl.runs.session import OpenedRun
from ppoctl.shutdown.signals import SignalGate
from ppoctl.slurm.run_status import require_idle
from ppoctl.stages.generation import SampleGeneration
from ppoctl.store import run_dir
from ppoctl.store.attempt import claim
from ppoctl.store.resume_plan import ResumePlan, plan_resume
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import Identified, Result, Stage
from ppoctl.tracking.screen import Screen
from ppoctl.wire import engines
from ppoctl.wire.components import Components
from ppoctl.wire.sources import require_same_sources
from ppoctl.wire.stages import evaluation_stage

RunUntil = Literal["rollout", "save"]
"""One thing that a resume may stop after: rollouts of the next step, or a save of the newest states."""


def train(loaded: Loaded, gate: SignalGate, *, runs: Path, or_resume: bool, screen: Screen) -> RunResult:
    """Create the run and do it. A directory that exists is refused, unless `or_resume`, or unless it holds nothing
    but the rollouts that `ppoctl rollout` drew for the same recipe, or not even one (see `is_replaceable`)."""
    paths = RunPaths(runs / loaded.recipe.name)
    if paths.root.exists() and not is_replaceable(paths):
        require_way(paths, or_resume=or_resume)
        return _continue(Opening(paths, loaded.recipe, gate, screen), _as_it_is(paths))
    try:
        return _begin(_new(paths, loaded, gate, screen), TRAIN, run)
    except RunExistsError:
        if not or_resume:
            raise
    return _continue(Opening(paths, loaded.recipe, gate, screen), _as_it_is(paths))  # another command was faster


@dataclass(frozen=True)
class Opening:
    """A run that a command begins or goes on with."""

    paths: RunPaths
    recipe: Recipe
    gate: SignalGate
    screen: Screen
    written: Mapping[str, str] = field(default_factory=dict)
    """Paths of a new run as its recipe has them (`recipe.as_written`)."""


def _new(paths: RunPaths, loaded: Loaded, gate: SignalGate, screen: Screen) -> Opening:
    return Opening(paths, loaded.recipe, gate, screen, paths_as_written(loaded))


def _begin(opening: Opening, command: str, do: Callable[[RunContext], None]) -> RunResult:
    layout, recipe = opening.paths, opening.recipe
    sockets, digests = session.prepare(recipe)
    with engines.closed_if_it_fails(sockets):
        if layout.root.exists() and is_replaceable(layout):
            run_dir.remove(layout)
        create(layout, recipe, digests, command=command, known={"rows": sockets.rows, "written": opening.written})
    plan = ResumePlan(start=0, items=())
    opened = OpenedRun(layout, {1: recipe}, sockets, plan)
    return session.attempt_run(opened, do, opening.gate, opening.screen)


def _as_it_is(paths: RunPaths) -> ResumePlan:
    """The plan of a run that is continued without a question. Raises StorageError naming what is missing or corrupt,
    RunAliveError when somebody is at work on it."""
    run_dir.facts(paths)
    require_idle(paths)
    plan = plan_resume(paths)
    plan.require_intact(paths)
    return plan


def resume(
    paths: RunPaths,
    plan: ResumePlan,
    sets: Sequence[str],
    gate: SignalGate,
    *,
    only: RunUntil | None,
    screen: Screen,
) -> RunResult:
    """Continue a run that was found whole, or do one thing only: draw the next rollouts, or save the newest
    pair of states again."""
    do = {"rollout": _draw_and_score, "save": _save_for_any_layout, None: run}[only]
    return _continue(Opening(paths, recipe_of(paths, sets), gate, screen), plan, do)


def planned_change(root: Path, sets: Sequence[str]) -> changed_settings.Change | None:
    """What a resume with these keys would change; None: nothing. Raises what it would raise before it starts
    anything."""
    paths = RunPaths(root.resolve())
    return changed_settings.change(paths, recipe_of(paths, sets))


def rollout(loaded: Loaded, gate: SignalGate, *, runs: Path, screen: Screen) -> RunResult:
    """Draw and score the rollouts of the next step, and stop; `train` goes on from them."""
    paths = RunPaths(runs / loaded.recipe.name)
    if not paths.root.exists() or is_replaceable(paths):
        return _begin(_new(paths, loaded, gate, screen), ROLLOUT, _draw_and_score)
    if not holds_only_rollouts(paths):
        raise RunExistsError(
            f"run directory `{paths.root}` exists and has been trained",
            hint=f"draw under another name: --set name={loaded.recipe.name}-2",
        )
    return _continue(Opening(paths, loaded.recipe, gate, screen), _as_it_is(paths), _draw_and_score)


def _draw_and_score(job: RunContext) -> None:
    """Tell the story of the next step as far as it draws and scores."""
    step, states, carry = start_point(job)
    once, given = job.runner.at(step + 1), StepInputs(job.prompts(step + 1), states, carry)

    def until_it_learns(stage: Stage[Result], *inputs: Identified) -> Result:
        if not draws_or_scores(stage.name):
            raise _StopStep
        return once(stage, *inputs)

    with suppress(_StopStep):
        job.step_function(step + 1).run(until_it_learns, job.stages(step + 1), given)


class _StopStep(Exception):  # noqa: N818 - it ends a story, and is no error
    """What was asked of a story has been told."""


def _save_for_any_layout(job: RunContext) -> None:
    step = start_point(job)[0]
    if not job.states.reshard(step):
        raise RecipeError(
            f"no state of step {step} is for some layouts only while the recipe asks for states for any",
            hint=f"ppoctl resume {quoted(job.paths.root)} --save-only --set checkpoint.reshardable=full",
        )


def _continue(opening: Opening, plan: ResumePlan, do: Callable[[RunContext], None] = run) -> RunResult:
    layout, recipe = opening.paths, opening.recipe
    changed_settings.change(layout, recipe)  # refuses what no resume can do before anything is opened
    sockets, digests = session.prepare(recipe)
    with engines.closed_if_it_fails(sockets):
        require_same_sources(layout, digests)
        attempt = claim(layout)  # before anything is written: an older attempt may still be at it
        run_dir.complete(attempt, digests, sockets.rows)
        change = changed_settings.adopt(attempt, recipe)
        recipes = recorded_recipes(layout)
    notes = tuple(change.lines()) if change is not None else ()
    opened = OpenedRun(layout, recipes, sockets, plan, notes=notes, attempt=attempt)
    return session.attempt_run(opened, do, opening.gate, opening.screen)


def evaluate(checkpoint: Checkpoint, notify: Callable[[str], None]) -> Evaluation:
    """The evaluation that `train` does every N steps, of any checkpoint. It only reads a run, which may be at work:
    finished samples are kept nowhere, and a signal ends it at once."""
    recipe = checkpoint.recipe
    preflight.require(recipe)
    engines.set_threads(recipe)
    questions = engines.read_questions(recipe)
    sets = questions.evaluation_sets()
    if not sets:
        raise RecipeError("the recipe has no table under `[data.eval]`", hint="ppoctl recipes keys data.eval")
    return evaluated(checkpoint, engines.open_engines(recipe, questions, {"model": ""}), sets, notify)


def evaluated(
    checkpoint: Checkpoint, sockets: Components, sets: Mapping[str, Prompts], notify: Callable[[str], None]
) -> Evaluation:
    """The evaluation of a checkpoint on these sets, with these engines, which are closed afterwards."""

    @cache
    def actor_at(state: State) -> Actor:
        assert state == checkpoint.state
        if checkpoint.manifest is None:
            sockets.actor.start()
        else:
            sockets.actor.load(checkpoint.folder)
        return sockets.actor

    with closing(sockets), closing(sockets.generator(actor_at, notify, None)) as generator:
        drawing = SampleGeneration(generator, NullPorts(), NullPorts(), lambda *_: None)
        return evaluation_stage(checkpoint.recipe, drawing, sockets, sets, notify).run(checkpoint.state)


class NullPorts:
    """The `SampleParts` and `Gate` ports of work that belongs to no run: nothing is kept, and nobody stops it."""

    def load(self, drawn_for: SampleSetKey) -> dict[str, Sample]:  # noqa: ARG002 - the port's signature
        return {}

    def writer(self, drawn_for: SampleSetKey) -> AbstractContextManager[Callable[[Sample], None]]:  # noqa: ARG002 - as above
        return nullcontext(lambda _: None)

    def before(self, step: int, stage: str) -> None:
        pass

    def between(self) -> None:
        pass

    def may_save(self) -> bool:
        return False
