"""Sockets + recipe + run directory -> a job for the loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ppoctl.batch.lineage import initial_state
from ppoctl.batch.records import Evaluation, State, Update
from ppoctl.loading.rules.metrics import is_lower_better
from ppoctl.loop.run import Health, RunContext
from ppoctl.loop.step_functions import StepFunction, stage_of, step_function_at
from ppoctl.ports import Gate, Generator
from ppoctl.recipe.parallel import saved_layout
from ppoctl.recipe.schema import Recipe
from ppoctl.stages.generation import OnProgress, SampleGeneration
from ppoctl.stages.overlapped_scoring import OverlappedScorer
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt
from ppoctl.store.best import BestStates
from ppoctl.store.finished_samples import FinishedSampleFiles
from ppoctl.store.journal import Journal
from ppoctl.store.ledger import Ledger
from ppoctl.store.outline import Outlines, outlines_of
from ppoctl.store.retention import Retention
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.saves import PublishingGate, Saves
from ppoctl.store.stage_runner import Observer, Stage, StageRunner, load_record
from ppoctl.store.states import States
from ppoctl.wire.components import Components
from ppoctl.wire.outlines import StoryAt
from ppoctl.wire.stages import StageBuilder, evaluation_stage

Held = TypeVar("Held")


@dataclass(frozen=True)
class RunHooks:
    """Who watches, and who may stop the job."""

    gate: Gate
    notify: Callable[[str], None]
    log: Callable[[str], None]
    """Takes what is for a log only."""
    observers: tuple[Observer, ...]
    health: Health
    versions: dict[str, str]
    verified: frozenset[str] = frozenset()
    """Folders of saved states whose files were compared with their manifests when the run was opened."""


def assemble(
    paths: RunPaths,
    attempt: Attempt,
    recipes: Mapping[int, Recipe],
    sockets: Components,
    around: RunHooks,
    choose: StoryAt = step_function_at,
) -> tuple[RunContext, Generator]:
    """A job on a run directory, and the generator, which must be closed after it. `recipes` by the first step they
    hold for; older ones are read for result keys."""
    newest = recipes[max(recipes)]
    journal, outlines = Journal(paths, attempt), outlines_of(paths)
    states = _states(attempt, newest, outlines, sockets, around)
    gate = PublishingGate(states.saves, around.gate)
    generator = sockets.generator(states.actor_at, around.notify, paths.attempt(attempt.number))
    parts = FinishedSampleFiles(paths, attempt, every_s=newest.rollout.keep_finished_every_s)
    drawing = SampleGeneration(generator, parts, gate, _to_all(around.observers))
    scorer = OverlappedScorer(sockets.scorer) if newest.reward.overlaps_generation else sockets.scorer
    builder = StageBuilder(states, drawing, scorer, around.notify, sockets.reward_digest)
    by_start = {start: builder.stages(recipe) for start, recipe in recipes.items()}
    stages = partial(_holding_at, by_start)

    def step_function(step: int) -> StepFunction:
        return choose(_holding_at(recipes, step), step)

    sets = sockets.prompts.evaluation_sets()

    def evaluate(step: int) -> Stage[Evaluation]:
        return evaluation_stage(_holding_at(recipes, step), drawing, sockets, sets, around.notify)

    states.replay = _replayer(paths, outlines, lambda step, name: stage_of(step_function(step), stages(step), name))
    job = RunContext(
        paths=paths,
        recipe=newest,
        runner=StageRunner(paths, attempt, journal, gate, around.observers, around.versions),
        journal=journal,
        ledger=Ledger(paths.ledger, attempt),
        states=states,
        retention=Retention(
            attempt,
            outlines,
            keep_last=newest.checkpoint.keep_last,
            keep_rollouts_every_steps=newest.checkpoint.keep_rollouts_every_steps,
        ),
        best=_best(attempt, newest, around.versions),
        health=around.health,
        step_function=step_function,
        outlines=outlines,
        stages=stages,
        prompts=sockets.prompts.prompts_for,
        evaluate=evaluate,
        notify=around.notify,
    )
    return job, generator


def _best(attempt: Attempt, recipe: Recipe, versions: Mapping[str, str]) -> BestStates | None:
    checkpoint = recipe.checkpoint
    if checkpoint.best is None:
        return None
    return BestStates(attempt, checkpoint.best, is_lower_better(checkpoint), checkpoint.best_keep, versions)


def _states(attempt: Attempt, recipe: Recipe, outlines: Outlines, sockets: Components, around: RunHooks) -> States:
    return States(
        paths=attempt.paths,
        outlines=outlines,
        attempt=attempt,
        engines={"actor": sockets.actor, "critic": sockets.critic},
        initial={role: initial_state(role, sockets.source_digests[role]) for role in outlines.roles},
        layouts={role: saved_layout(recipe, role) for role in outlines.roles},
        saves=Saves(around.log, recipe.checkpoint.asynchronous),
        versions=around.versions,
        observers=around.observers,
        notify=around.notify,
        verified=around.verified,
    )


def _to_all(observers: tuple[Observer, ...]) -> OnProgress:
    def progress(done: int, total: int, tokens: int) -> None:
        for observer in observers:
            observer.on_progress(done, total, tokens)

    return progress


def _holding_at(by_start: Mapping[int, Held], step: int) -> Held:
    """What holds at this step, of what holds from given steps on."""
    return by_start[max(start for start in by_start if start <= max(step, 1))]


def _replayer(
    paths: RunPaths, outlines: Outlines, stage: Callable[[int, str], Stage[State]]
) -> Callable[[int, str, State], Update]:
    """Re-runs a recorded update from the committed inputs of its step."""

    def recall(step: int, stage: str) -> object:
        return load_record(paths, step, stage, manifests.require(paths.stage(step, stage)))

    def replay(step: int, role: str, parent: State) -> Update:
        told = outlines.at(step).training(role)
        assert told is not None, "an update of this role was recorded in this step"
        record = stage(step, told.name).run(*(parent if name == role else recall(step, name) for name in told.reads))
        assert isinstance(record, Update)
        return record

    return replay
