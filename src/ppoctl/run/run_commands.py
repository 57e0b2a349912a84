"""Implementation of the commands that work on a run: `train`, `resume`, `rollout` and `eval`. The command line is
parsed elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from ppoctl.algorithms.evaluation_spec import EVALUATION
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.stage_spec import ScoringParts, StageSpec
from ppoctl.algorithms.stages.generation import SampleGeneration
from ppoctl.core.batch.prompts import Prompts
from ppoctl.core.batch.records import Evaluation, State
from ppoctl.core.errors import PpoctlError, RecipeError, RunExistsError, quoted
from ppoctl.core.ports import Actor, Sample, SampleSetKey
from ppoctl.recipe.loading.load import Loaded
from ppoctl.recipe.schema import Recipe
from ppoctl.run import changed_settings, session
from ppoctl.run.eval_target import Checkpoint
from ppoctl.run.loop.run_stage import RunningStep
from ppoctl.run.loop.steps import RunContext, inputs_of, run, running_step, start_point
from ppoctl.run.new_run import (
    ROLLOUT,
    TRAIN,
    create,
    generates_or_scores,
    holds_only_rollouts,
    is_taken,
    known_of,
    make_way,
    require_way,
)
from ppoctl.run.run_recipe import recipe_of, recorded_recipes
from ppoctl.run.session import OpenedRun
from ppoctl.run.shutdown.signals import SignalGate
from ppoctl.run.wire import engines
from ppoctl.run.wire.components import Components
from ppoctl.run.wire.sources import clock_notes, clock_of, require_same_sources
from ppoctl.show.report.expectations import RunResult
from ppoctl.show.tracking.screen import Screen
from ppoctl.start.preflight import check as preflight
from ppoctl.start.slurm.run_status import require_idle
from ppoctl.store import run_dir
from ppoctl.store.attempt import claim
from ppoctl.store.parallel_run import ParallelRuns
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import ResumePlan, plan_resume
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import Stage

RunUntil = Literal["rollout", "save"]
"""Work that a resume may be limited to: the rollouts of the next step, or saving the newest states again."""


def train(loaded: Loaded, gate: SignalGate, *, runs: Path, or_resume: bool, screen: Screen) -> RunResult:
    """Create the run and run it.

    An existing directory is an error, unless `or_resume` is set, the run contains only rollouts of `ppoctl rollout`
    for the same recipe, or it can be replaced (`new_run.is_replaceable`).
    """
    paths = RunPaths(runs / loaded.recipe.name)
    require_way(paths, or_resume=or_resume)
    if not is_taken(paths):
        try:
            return _begin(_new(paths, loaded, gate, screen), TRAIN, run)
        except RunExistsError:  # another command created the run meanwhile
            if not or_resume:
                raise
    return _continue_intact(Opening(paths, loaded.recipe, gate, screen))


@dataclass(frozen=True)
class Opening:
    """A run that a command starts or continues."""

    paths: RunPaths
    recipe: Recipe
    gate: SignalGate
    screen: Screen
    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Facts about a new run (`new_run.known_of`)."""


def _new(paths: RunPaths, loaded: Loaded, gate: SignalGate, screen: Screen) -> Opening:
    return Opening(paths, loaded.recipe, gate, screen, known_of(loaded))


def _begin(opening: Opening, command: str, do: Callable[[RunContext], None]) -> RunResult:
    paths, recipe = opening.paths, opening.recipe
    components, digests = session.prepare(recipe, datetime.now().replace(microsecond=0))
    with engines.closed_if_it_fails(components):
        make_way(paths)
        create(paths, recipe, digests, command=command, known={"rows": components.rows, **opening.known})
    plan = ResumePlan(start=0, items=())
    opened = OpenedRun(paths, {1: recipe}, components, plan, notes=clock_notes(digests))
    return session.attempt_run(opened, do, opening.gate, opening.screen)


def _continue_intact(opening: Opening, do: Callable[[RunContext], None] = run) -> RunResult:
    """Continue a run without confirmation.

    Raises StorageError that names what is missing or corrupt, and RunAliveError if another process is using the run.
    """
    recorded = RecordedRun.open(opening.paths.root)
    require_idle(opening.paths)
    plan = plan_resume(recorded)
    plan.require_intact(opening.paths)
    return _continue(opening, recorded, plan, do)


def resume(
    recorded: RecordedRun,
    plan: ResumePlan,
    sets: Sequence[str],
    gate: SignalGate,
    *,
    only: RunUntil | None,
    screen: Screen,
) -> RunResult:
    """Continue an intact run, or only generate the next rollouts or save the newest states again (`only`)."""
    do = {"rollout": _generate_and_score, "save": _save_for_any_layout, None: run}[only]
    return _continue(Opening(recorded.paths, recipe_of(recorded, sets), gate, screen), recorded, plan, do)


def rollout(loaded: Loaded, gate: SignalGate, *, runs: Path, screen: Screen) -> RunResult:
    """Generate and score the rollouts of the next step, and stop. `train` continues from them."""
    paths = RunPaths(runs / loaded.recipe.name)
    if not is_taken(paths):
        return _begin(_new(paths, loaded, gate, screen), ROLLOUT, _generate_and_score)
    if not holds_only_rollouts(paths):
        raise RunExistsError(
            f"run directory `{paths.root}` exists and has been trained",
            hint=f"generate under another name: --set name={loaded.recipe.name}-2",
        )
    return _continue_intact(Opening(paths, loaded.recipe, gate, screen), _generate_and_score)


def _generate_and_score(job: RunContext) -> None:
    """Run the step function of the next step up to its first stage after generation and scoring."""
    done, states, carry = start_point(job)
    running = running_step(job, done + 1, ParallelRuns())

    def build(spec: StageSpec[Any]) -> Stage[Any]:
        if not generates_or_scores(spec.name):
            raise _StopStep
        return running.build(spec)

    with suppress(_StopStep):
        step = _WithoutParallelStages(running.runner, build)
        job.step_function(done + 1).run(step, inputs_of(job, done + 1, states, carry))


class _WithoutParallelStages(RunningStep):
    """`run_stage` that generates only the responses of this step."""

    def meanwhile(self, stage: StageSpec[Any], *inputs: Any) -> None:
        """Do nothing."""

    def begin_early(self, stage: StageSpec[Any], *inputs: Any, beside: StageSpec[Any]) -> None:
        """Do nothing."""


class _StopStep(Exception):  # noqa: N818 - it ends a step function and is not an error
    """Exception that ends a step function before the first stage that is not requested."""


def _save_for_any_layout(job: RunContext) -> None:
    step = start_point(job)[0]
    if not job.states.reshard(step):
        raise RecipeError(
            f"all states of step {step} can be loaded under any layout, or `checkpoint.reshardable` is not `full`",
            hint=f"ppoctl resume {quoted(job.paths.root)} --save-only --set checkpoint.reshardable=full",
        )


def _continue(
    opening: Opening, recorded: RecordedRun, plan: ResumePlan, do: Callable[[RunContext], None]
) -> RunResult:
    paths, recipe = opening.paths, opening.recipe
    changed_settings.change(recorded, recipe)  # raises for an impossible change before anything is opened
    try:
        components, digests = session.prepare(recipe, clock_of(recorded))
    except PpoctlError as error:
        session.name_the_run(error, paths)
        raise
    with engines.closed_if_it_fails(components):
        require_same_sources(recorded, digests)
        attempt = claim(paths)  # claim before anything is written: an older attempt may still be running
        recorded.refresh()
        run_dir.complete(attempt, digests, components.rows)
        change = changed_settings.adopt(attempt, recorded, recipe)
        recipes = recorded_recipes(recorded)
    notes = (*clock_notes(digests), *(change.lines() if change is not None else ()))
    opened = OpenedRun(paths, recipes, components, plan, notes=notes, attempt=attempt)
    return session.attempt_run(opened, do, opening.gate, opening.screen)


def evaluate(checkpoint: Checkpoint, notify: Callable[[str], None]) -> Evaluation:
    """Run the evaluation that `train` runs every N steps, for any checkpoint.

    The evaluation only reads the run directory, and the run may be running. Finished samples are not kept, and a
    signal ends the evaluation at once.
    """
    recipe = checkpoint.recipe
    preflight.require(recipe)
    engines.set_threads(recipe)
    prompt_source = engines.read_prompts(recipe, checkpoint.clock)
    sets = prompt_source.evaluation_sets()
    if not sets:
        raise RecipeError("the recipe has no table under `[data.eval]`", hint="ppoctl recipes keys data.eval")
    return evaluated(checkpoint, engines.open_engines(recipe, prompt_source, {"model": ""}), sets, notify)


def evaluated(
    checkpoint: Checkpoint, components: Components, sets: Mapping[str, Prompts], notify: Callable[[str], None]
) -> Evaluation:
    """Run the evaluation of a checkpoint on these sets with these components, and close the components."""

    policy = components.trainers[POLICY]

    @cache
    def actor_at(state: State) -> Actor:
        assert state == checkpoint.state
        if checkpoint.manifest is None:
            policy.start()
        else:
            policy.load(checkpoint.folder)
        return cast(Actor, policy)

    with closing(components), closing(components.generator(actor_at, notify, None)) as generator:
        parts = ScoringParts(
            generation=SampleGeneration(generator, NullPorts(), NullPorts(), lambda *_: None),
            scorer=components.scorer,
            notify=notify,
            reward_digest=components.reward_digest,
            evaluation_sets=sets,
            eval_environments=components.eval_environments,
            dialogue=components.dialogue,
        )
        return EVALUATION.build(checkpoint.recipe, parts).run(checkpoint.state).result


class NullPorts:
    """The `FinishedSamples` and `Gate` ports of work outside a run: samples are not kept, and nothing stops the
    work."""

    def load(self, key: SampleSetKey) -> dict[str, Sample]:  # noqa: ARG002 - the port's signature
        return {}

    def writer(
        self,
        key: SampleSetKey,  # noqa: ARG002 - as above
        *,
        to_the_end: bool = False,  # noqa: ARG002 - as above
    ) -> AbstractContextManager[Callable[[Sample], None]]:
        return nullcontext(lambda _: None)

    def before(self, step: int, stage: str) -> None:
        pass

    def between(self) -> None:
        pass

    def may_save(self) -> bool:
        return False
