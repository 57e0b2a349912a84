"""Sockets + recipe + run directory -> a job for the loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ppoctl.batch.lineage import initial_state
from ppoctl.batch.records import Carry, Evaluation, State, Update
from ppoctl.loop.run import Cadence, Health, Job
from ppoctl.loop.step import Stages
from ppoctl.ports import Generator, Scorer
from ppoctl.recipe.parallel import saved_layout
from ppoctl.recipe.schema import Recipe
from ppoctl.stages.rollout import Progress
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt
from ppoctl.store.journal import Journal
from ppoctl.store.layout import ROLES, RunLayout
from ppoctl.store.ledger import Ledger
from ppoctl.store.once import Observer, Once, Stage, load_record
from ppoctl.store.parts import RolloutParts
from ppoctl.store.retention import Retention
from ppoctl.store.saves import Saves
from ppoctl.store.states import States
from ppoctl.wire.sockets import Sockets
from ppoctl.wire.stages import StageBuilder, evaluation_stage


@dataclass(frozen=True)
class Surroundings:
    """Who watches, and how the job is told to stop."""

    check_stop: Callable[[], None]
    say: Callable[[str], None]
    observers: tuple[Observer, ...]
    health: Health
    versions: dict[str, str]
    verified: frozenset[str] = frozenset()
    """Folders of saved states whose files were compared with their manifests when the run was opened."""


@dataclass(frozen=True)
class Wiring:
    """A job and what must be closed after it."""

    job: Job
    generator: Generator
    scorer: Scorer
    close_trainers: Callable[[], None]

    def close(self) -> None:
        self.generator.close()
        self.close_trainers()
        self.scorer.close()


def assemble(
    layout: RunLayout,
    attempt: Attempt,
    recipes: Mapping[int, Recipe],
    sockets: Sockets,
    around: Surroundings,
) -> Wiring:
    """A job on a run directory. `recipes` by the first step they hold for; older ones are read for result keys."""
    newest = recipes[max(recipes)]
    journal = Journal(layout, attempt)
    states = _states(attempt, newest, sockets, around)

    def between_work() -> None:
        """What is written by now is published; then the job stops if it was asked to."""
        states.saves.settle()
        around.check_stop()

    generator = sockets.generator(states, around.say)
    parts = RolloutParts(layout, attempt, every_s=newest.rollout.keep_finished_every_s)
    builder = StageBuilder(
        models=states,
        generator=generator,
        scorer=sockets.scorer,
        questions=sockets.questions,
        parts=parts,
        check_stop=between_work,
        progress=_to_all(around.observers),
    )
    by_start = {start: builder.stages(recipe) for start, recipe in recipes.items()}

    def stages(step: int) -> Stages:
        return by_start[max(start for start in by_start if start <= max(step, 1))]

    sets = sockets.questions.evaluation_sets()

    def evaluate(step: int) -> Stage[Evaluation] | None:
        return evaluation_stage(_recipe_at(recipes, step), generator, sockets.scorer, sets) if sets else None

    states.replay = _replayer(layout, stages)
    job = Job(
        layout=layout,
        cadence=cadence(newest),
        once=Once(layout, attempt, journal, between_work, around.observers, around.versions),
        journal=journal,
        ledger=Ledger(layout.ledger, attempt),
        parts=parts,
        states=states,
        retention=Retention(layout, newest.checkpoint.keep_last, newest.checkpoint.keep_rollouts_every_steps),
        health=around.health,
        stages=stages,
        prompts=sockets.questions.prompts_for,
        evaluate=evaluate,
        first_carry=Carry(kl_coef=0.0),
        say=around.say,
    )
    return Wiring(job, generator, sockets.scorer, sockets.close_trainers)


def _states(attempt: Attempt, recipe: Recipe, sockets: Sockets, around: Surroundings) -> States:
    return States(
        layout=attempt.layout,
        attempt=attempt,
        engines={"actor": sockets.actor, "critic": sockets.critic},
        initial={role: initial_state(role, sockets.source_digest) for role in ROLES},
        layouts={role: saved_layout(recipe, role) for role in ROLES},
        saves=Saves(around.say, recipe.checkpoint.asynchronous),
        versions=around.versions,
        observers=around.observers,
        say=around.say,
        verified=around.verified,
    )


def _to_all(observers: tuple[Observer, ...]) -> Progress:
    def progress(done: int, total: int, tokens: int) -> None:
        for observer in observers:
            observer.on_progress(done, total, tokens)

    return progress


def cadence(recipe: Recipe) -> Cadence:
    """When what happens, from the recipe's tables."""
    return Cadence(
        steps=recipe.steps,
        critic_only_steps=recipe.ppo.critic_only_steps,
        save_every_steps=recipe.checkpoint.every_steps,
        eval_every_steps=recipe.eval.every_steps,
        eval_at_start=recipe.eval.at_start,
        best=recipe.checkpoint.best,
    )


def _recipe_at(recipes: Mapping[int, Recipe], step: int) -> Recipe:
    return recipes[max(start for start in recipes if start <= max(step, 1))]


def _replayer(layout: RunLayout, stages: Callable[[int], Stages]) -> Callable[[int, str, State], Update]:
    """Re-runs a recorded update from the committed inputs of its step."""

    def recall(step: int, stage: str) -> object:
        manifest = manifests.read(layout.stage(step, stage))
        assert manifest is not None
        return load_record(layout, step, stage, manifest)

    def replay(step: int, role: str, parent: State) -> Update:
        inputs = ("rollout", "values" if role == "critic" else "logprobs", "advantages")
        stage: Stage[State] = stages(step).critic_update if role == "critic" else stages(step).actor_update
        record = stage.run(parent, *(recall(step, name) for name in inputs))
        assert isinstance(record, Update)
        return record

    return replay
