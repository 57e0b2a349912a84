"""Construction of the run context from components, recipes and run directory."""

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
from ppoctl.wire.outlines import StepFunctionAt
from ppoctl.wire.stages import StageBuilder, evaluation_stage

Item = TypeVar("Item")


@dataclass(frozen=True)
class RunHooks:
    """Observers of a run, and the gate that may stop the run."""

    gate: Gate
    notify: Callable[[str], None]
    log: Callable[[str], None]
    """Function that receives messages that are written only to the log."""
    observers: tuple[Observer, ...]
    health: Health
    versions: dict[str, str]
    verified: frozenset[str] = frozenset()
    """Folders of saved states whose files were compared with the manifest of the folder when the run was opened."""


def assemble(
    paths: RunPaths,
    attempt: Attempt,
    recipes: Mapping[int, Recipe],
    components: Components,
    hooks: RunHooks,
    choose: StepFunctionAt = step_function_at,
) -> tuple[RunContext, Generator]:
    """Return the context of a run, and the generator (vLLM) of the run, which the caller must close.

    `recipes` maps the first step of each recipe to the recipe. Earlier recipes are used for replays and unfinished
    steps.
    """
    newest = recipes[max(recipes)]
    journal, outlines = Journal(paths, attempt), outlines_of(paths)
    states = _states(attempt, newest, outlines, components, hooks)
    gate = PublishingGate(states.saves, hooks.gate)
    generator = components.generator(states.actor_at, hooks.notify, paths.attempt(attempt.number))
    parts = FinishedSampleFiles(paths, attempt, every_s=newest.rollout.keep_finished_every_s)
    drawing = SampleGeneration(generator, parts, gate, _to_all(hooks.observers))
    scorer = OverlappedScorer(components.scorer) if newest.reward.overlaps_generation else components.scorer
    builder = StageBuilder(states, drawing, scorer, hooks.notify, components.reward_digest)
    by_start = {start: builder.stages(recipe) for start, recipe in recipes.items()}
    stages = partial(_valid_at, by_start)

    def step_function(step: int) -> StepFunction:
        return choose(_valid_at(recipes, step), step)

    sets = components.prompts.evaluation_sets()

    def evaluate(step: int) -> Stage[Evaluation]:
        return evaluation_stage(_valid_at(recipes, step), drawing, components, sets, hooks.notify)

    states.replay = _replayer(paths, outlines, lambda step, name: stage_of(step_function(step), stages(step), name))
    job = RunContext(
        paths=paths,
        recipe=newest,
        runner=StageRunner(paths, attempt, journal, gate, hooks.observers, hooks.versions),
        journal=journal,
        ledger=Ledger(paths.ledger, attempt),
        states=states,
        retention=Retention(
            attempt,
            outlines,
            keep_last=newest.checkpoint.keep_last,
            keep_rollouts_every_steps=newest.checkpoint.keep_rollouts_every_steps,
        ),
        best=_best(attempt, newest, hooks.versions),
        health=hooks.health,
        step_function=step_function,
        outlines=outlines,
        stages=stages,
        prompts=components.prompts.prompts_for,
        evaluate=evaluate,
        notify=hooks.notify,
    )
    return job, generator


def _best(attempt: Attempt, recipe: Recipe, versions: Mapping[str, str]) -> BestStates | None:
    checkpoint = recipe.checkpoint
    if checkpoint.best is None:
        return None
    return BestStates(attempt, checkpoint.best, is_lower_better(checkpoint), checkpoint.best_keep, versions)


def _states(attempt: Attempt, recipe: Recipe, outlines: Outlines, components: Components, hooks: RunHooks) -> States:
    return States(
        paths=attempt.paths,
        outlines=outlines,
        attempt=attempt,
        engines=components.trainers,
        initial={role: initial_state(role, components.source_digests[role]) for role in outlines.roles},
        layouts={role: saved_layout(recipe, role) for role in outlines.roles},
        saves=Saves(hooks.log, recipe.checkpoint.asynchronous),
        versions=hooks.versions,
        observers=hooks.observers,
        notify=hooks.notify,
        verified=hooks.verified,
    )


def _to_all(observers: tuple[Observer, ...]) -> OnProgress:
    def progress(done: int, total: int, tokens: int) -> None:
        for observer in observers:
            observer.on_progress(done, total, tokens)

    return progress


def _valid_at(by_start: Mapping[int, Item], step: int) -> Item:
    """Return the item that is valid at this step. `by_start` has each item by the first step it is valid for."""
    return by_start[max(start for start in by_start if start <= max(step, 1))]


def _replayer(
    paths: RunPaths, outlines: Outlines, stage: Callable[[int, str], Stage[State]]
) -> Callable[[int, str, State], Update]:
    """Return a function that reruns a recorded update from the committed inputs of its step."""

    def load(step: int, stage: str) -> object:
        return load_record(paths, step, stage, manifests.require(paths.stage(step, stage)))

    def replay(step: int, role: str, parent: State) -> Update:
        entry = outlines.at(step).training(role)
        assert entry is not None, "no stage of this step trains the role"
        record = stage(step, entry.name).run(*(parent if name == role else load(step, name) for name in entry.reads))
        assert isinstance(record, Update)
        return record

    return replay
