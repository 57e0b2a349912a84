"""Construction of the run context from components, recipes and run directory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ppoctl.algorithms.choose import StepFunctionAt, step_function_at, trace_at
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.stage_spec import StageParts, StageSpec
from ppoctl.algorithms.stages.generation import SampleGeneration
from ppoctl.algorithms.stages.overlapped_scoring import OverlappedScorer
from ppoctl.algorithms.trace import StepFunction
from ppoctl.core.batch.lineage import initial_state
from ppoctl.core.batch.records import State, Update
from ppoctl.core.errors import StorageError, quoted
from ppoctl.core.ports import Gate, Generator, OnProgress
from ppoctl.plan.throughput import StageMeter
from ppoctl.recipe.loading.rules.metrics_rules import is_lower_better
from ppoctl.recipe.parallel import saved_layout
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.run_stage import ReplayingStep, replay
from ppoctl.run.loop.steps import Health, RunContext
from ppoctl.run.wire.components import Components
from ppoctl.store.attempt import Attempt
from ppoctl.store.best import BestStates
from ppoctl.store.episode_log import EpisodeLogFiles
from ppoctl.store.finished_samples import FinishedSampleFiles
from ppoctl.store.journal import Journal
from ppoctl.store.ledger import Ledger
from ppoctl.store.outline import Outline, Outlines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.retention import Retention
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.saves import PublishingGate, Saves
from ppoctl.store.stage_runner import Observer, Stage, StageRunner
from ppoctl.store.states import States


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


@dataclass(frozen=True)
class StepsOfRun:
    """Step function and stages of each step, from the recipe that is valid at the step."""

    recipes: Mapping[int, Recipe]
    """First step of a recipe -> the recipe."""
    parts: StageParts
    choose: StepFunctionAt
    _built: dict[tuple[int, StageSpec[Any]], Stage[Any]] = field(default_factory=dict)

    def valid_from(self, step: int) -> int:
        """Return the first step of the recipe that is valid at this step. Step 0 has the recipe of step 1."""
        return max(start for start in self.recipes if start <= max(step, 1))

    def function(self, step: int) -> StepFunction:
        """Return the step function of a step."""
        return self.choose(self.recipes[self.valid_from(step)], step)

    def build(self, step: int, spec: StageSpec[Any]) -> Stage[Any]:
        """Return the stage of a step. Each recipe builds a stage once."""
        key = self.valid_from(step), spec
        if key not in self._built:
            self._built[key] = spec.build(self.recipes[key[0]], self.parts)
        return self._built[key]


def _replay(steps: StepsOfRun, paths: RunPaths, outlines: Outlines, step: int, role: str, parent: State) -> Update:
    """Run a recorded update again from the committed records of its step."""
    entry = outlines.at(step).training(role)
    assert entry is not None, "no stage of this step trains the role"
    return replay(steps.function(step), ReplayingStep(paths, step, entry.name, partial(steps.build, step)), parent)


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
    journal, outlines = Journal(paths, attempt), RecordedRun(paths).outlines
    _require_same_steps(paths, recipes, outlines, choose)
    states = _states(attempt, newest, outlines, components, hooks, journal)
    gate = PublishingGate(states.saves, hooks.gate)
    generator = components.generator(states.actor_at, hooks.notify, paths.attempt(attempt.number))
    finished = FinishedSampleFiles(paths, attempt, every_s=newest.rollout.keep_finished_every_s)
    scorer, measure = OverlappedScorer(components.scorer), StageMeter(newest).metrics
    parts = StageParts(
        models=states,
        generation=SampleGeneration(
            generator, finished, gate, _to_all(hooks.observers), EpisodeLogFiles(paths, attempt)
        ),
        scorer=scorer,
        notify=hooks.notify,
        reward_digest=components.reward_digest,
        evaluation_sets=components.prompts.evaluation_sets(),
        environments=components.environments,
        eval_environments=components.eval_environments,
        dialogue=components.dialogue,
    )
    steps = StepsOfRun(recipes, parts, choose)
    states.replay = partial(_replay, steps, paths, outlines)
    job = RunContext(
        paths=paths,
        recipe=newest,
        runner=StageRunner(paths, attempt, journal, gate, hooks.observers, hooks.versions, measure),
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
        policy=POLICY,
        step_function=steps.function,
        outlines=outlines,
        build=steps.build,
        prompts=components.prompts.prompts_for,
        notify=hooks.notify,
    )
    return job, generator


def _require_same_steps(
    paths: RunPaths, recipes: Mapping[int, Recipe], recorded: Outlines, choose: StepFunctionAt
) -> None:
    """Raise StorageError if this version of ppoctl would run or replay a step with other stages than the run
    recorded.

    Steps up to the newest saved states are finished and are not checked.
    """
    first = max(paths.saved_steps(*recorded.roles), default=0) + 1
    last = recipes[max(recipes)].steps
    starts = {step for step in (*recorded.by_start, *recipes) if first < step <= last}
    for step in sorted({first, *starts} if first <= last else ()):
        start = max(start for start in recipes if start <= step)
        now, then = trace_at(recipes[start], step, choose).outline, recorded.at(step)
        if now != then:
            message = (
                f"`{paths.root}` recorded step {step} as {_words(then)}, but this version of ppoctl has another step"
            )
            raise StorageError(
                f"{message}: {_words(now)}",
                hint="continue with the version that began it, which this command prints: "
                f"cat {quoted(paths.run_json)}",
            )


def _words(outline: Outline) -> str:
    return f"`{outline.story}` ({', '.join(outline.names)})"


def _best(attempt: Attempt, recipe: Recipe, versions: Mapping[str, str]) -> BestStates | None:
    checkpoint = recipe.checkpoint
    if checkpoint.best is None:
        return None
    return BestStates(attempt, checkpoint.best, is_lower_better(checkpoint), checkpoint.best_keep, versions)


def _states(
    attempt: Attempt, recipe: Recipe, outlines: Outlines, components: Components, hooks: RunHooks, journal: Journal
) -> States:
    return States(
        paths=attempt.paths,
        outlines=outlines,
        attempt=attempt,
        engines=components.trainers,
        initial={role: initial_state(role, components.source_digests[role]) for role in outlines.roles},
        layouts={role: saved_layout(recipe, role) for role in outlines.roles},
        saves=Saves(hooks.log, recipe.checkpoint.asynchronous, journal),
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
