"""Over steps: tell the story, keep the ledger, evaluate, judge, save, retain. One loop for `train` and `resume`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from ppoctl.batch.prompts import Prompts
from ppoctl.batch.records import Carry, Evaluation, Record, State
from ppoctl.errors import (
    FinishedShortError,
    HealthStopError,
    InterruptedByUserError,
    PpoctlError,
    PreemptedError,
)
from ppoctl.loop.step_functions import Stages, StepFunction, StepInputs, StepOutputs
from ppoctl.metric_registry import eval_set
from ppoctl.recipe.cadence import evaluates, saves
from ppoctl.recipe.schema import Recipe
from ppoctl.store.best import BestStates
from ppoctl.store.jobs import resume_command
from ppoctl.store.journal import Journal
from ppoctl.store.ledger import Ledger
from ppoctl.store.outline import Outlines
from ppoctl.store.retention import Retention, healthy_steps, saved_steps
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import Stage, StageRunner
from ppoctl.store.states import Recorded, States, saved_state


@runtime_checkable
class Alarm(Protocol):
    """What a health rule says of a step."""

    @property
    def action(self) -> str: ...

    @property
    def text(self) -> str: ...


@runtime_checkable
class Health(Protocol):
    """The recipe's health rules, which count in how many steps in a row they were broken."""

    def replay(self, history: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Count the steps before the one that the run goes on from."""
        ...

    def check(self, step: int, figures: Mapping[str, float]) -> Sequence[Alarm]: ...

    def would_stop(self, step: int, figures: Mapping[str, float]) -> bool: ...


@dataclass(frozen=True)
class RunContext:
    """Everything the loop needs, wired."""

    paths: RunPaths
    recipe: Recipe
    """The newest; stages and stories know the ones of before."""
    runner: StageRunner
    journal: Journal
    ledger: Ledger
    states: States
    retention: Retention
    best: BestStates | None
    """None: no best actor is kept."""
    health: Health
    step_function: Callable[[int], StepFunction]
    outlines: Outlines
    stages: Callable[[int], Stages]
    """Settings that were changed on the way hold from their step on."""
    prompts: Callable[[int], Prompts]
    evaluate: Callable[[int], Stage[Evaluation]]
    """Asked for steps that are evaluated only."""
    notify: Callable[[str], None]


def run(job: RunContext) -> None:
    """Do what is left of the run. Raises HealthStopError when a rule with `action = "stop"` is broken,
    FinishedShortError when not all steps are on disk at the end, and whatever error stopped a stage; everything
    committed stays. States in flight are committed when the run ends or is asked to stop, and those in memory are
    saved then, where there is time; another error leaves them to the redo log."""
    done = CompletedStep(*start_point(job))
    try:
        _do_steps(job, done)
    except (PreemptedError, InterruptedByUserError):
        job.states.saves.finish()
        if job.runner.gate.may_save():
            _save_at_stop(job, done)
        raise
    job.states.saves.finish()
    job.retention.apply()
    _require_the_last_step(job)
    job.retention.drop_all_kept_at_stop()


def _require_the_last_step(job: RunContext) -> None:
    """The plan against what is on disk: a run that did too little must not look like one that did all."""
    reached, planned = last_saved(job), job.recipe.steps
    if reached < planned:
        raise FinishedShortError(
            f"the run ended at its newest saved step {reached} of the {planned} that `steps` asks for",
            hint=resume_command(job.paths.root),
        )


def last_saved(job: RunContext) -> int:
    """The newest step with the states of all roles saved; 0: none."""
    return max(saved_steps(job.paths, job.outlines.roles), default=0)


@dataclass
class CompletedStep:
    """The last step that is done, saving included, and where it led."""

    step: int
    states: Mapping[str, State]
    carry: Carry


def _do_steps(job: RunContext, done: CompletedStep) -> None:
    step, states, carry = done.step, done.states, done.carry
    # Up to the saved step, not further: what is run again after it is judged again.
    job.health.replay(job.journal.history(up_to=step))
    if step == 0:
        _evaluate(job, 0, states["actor"])
    while step < job.recipe.steps:
        step += 1
        given = StepInputs(job.prompts(step), states, carry)
        outcome = job.step_function(step).run(job.runner.at(step), _keeping_best(job, step, job.stages(step)), given)
        waiting = {role: replace(state, step=step) for role, state in states.items() if role not in outcome.states}
        states = {**outcome.states, **waiting}
        carry = outcome.carry
        job.ledger.record(step, outcome.samples, _used_by(outcome))
        _evaluate(job, step, states["actor"])
        _judge_and_save(job, step, states, carry)
        done.step, done.states, done.carry = step, states, carry


def _save_at_stop(job: RunContext, done: CompletedStep) -> None:
    """Save what is in memory: as states of the last step where all engines are at it, so that the run goes on from
    there; what an engine is at within a step by itself, for the next attempt to load instead of replaying. A disk
    that does not take it, or an engine that cannot, changes nothing about the stop."""
    try:
        job.retention.apply()
        if done.step > 0 and all(job.states.is_at(state) for state in done.states.values()):
            lines = replace(_recorded(job, done.step), at_stop=True)
            _save(job, done, lines, healthy=True)
            job.states.saves.finish()
        job.states.keep_residents()
    except (PreemptedError, InterruptedByUserError):
        raise
    except (PpoctlError, RuntimeError, MemoryError) as error:  # of torch, too
        job.notify(f"what is in memory could not be saved: {error}")


def start_point(job: RunContext) -> tuple[int, dict[str, State], Carry]:
    """The newest step with the states of all roles saved, or the beginning."""
    step = last_saved(job)
    if step == 0:
        return 0, dict(job.states.initial), Carry(kl_coef=0.0)
    saved = {role: saved_state(job.paths, role, step) for role in job.outlines.roles}
    return step, {role: state for role, (state, _) in saved.items()}, saved["actor"][1]


def _used_by(outcome: StepOutputs) -> dict[str, str]:
    """Role -> the lineage that the step's samples led it to."""
    return {role: state.lineage[:16] for role, state in outcome.states.items()}


def _evaluate(job: RunContext, step: int, actor: State) -> None:
    if evaluates(job.recipe, step):
        job.runner.at(step)(job.evaluate(step), actor)


def _judge_and_save(job: RunContext, step: int, states: Mapping[str, State], carry: Carry) -> None:
    figures = job.journal.metrics(step)
    verdicts = job.health.check(step, figures)
    for verdict in verdicts:
        job.notify(f"{verdict.action}: {verdict.text}")
    stops = [verdict.text for verdict in verdicts if verdict.action == "stop"]
    if not stops and not _is_measured_before_the_update(job, step):
        _save_best(job, states["actor"], figures)
    if saves(job.recipe, step) or stops:
        job.states.saves.finish()  # of the step before; what they make superfluous goes before the new ones come
        job.retention.apply()
        for state in states.values():
            job.states.take_up(state)
        job.retention.drop_kept_at_stop(step)  # before the new ones come: a disk may have no room for both
        _save(job, CompletedStep(step, states, carry), _recorded(job, step), healthy=not stops)
    if stops:
        job.states.saves.finish()
        raise HealthStopError("; ".join(stops), hint=_after_health_stop(job))
    job.retention.apply()


def _recorded(job: RunContext, step: int) -> Recorded:
    return Recorded(job.journal.seq, job.ledger.end_of(step))


def _save(job: RunContext, done: CompletedStep, lines: Recorded, *, healthy: bool) -> None:
    for state in done.states.values():
        job.states.save(state, done.carry, job.journal.metrics(done.step), lines, healthy=healthy)


def _after_health_stop(job: RunContext) -> str:
    """How to go on: from the last healthy states, or from those that were saved as the rule stopped the run."""
    healthy = healthy_steps(job.paths, job.outlines.roles)
    resume = resume_command(job.paths.root)
    if not healthy:
        return f"everything up to this step is committed; go on from here, perhaps with changed keys: {resume}"
    back = f"{resume} --back-to {healthy[-1]}"
    return f"go on from the last healthy states: {back}; from the present ones: {resume}"


def _keeping_best(job: RunContext, step: int, stages: Stages) -> Stages:
    """The stages of a step that keep the actor it was drawn from, where its figures are the best so far."""
    if not _is_measured_before_the_update(job, step):
        return stages
    return replace(stages, actor_update=_SaveBestBeforeUpdate(stages.actor_update, job, step))


def _is_measured_before_the_update(job: RunContext, step: int) -> bool:
    """Whether the metric of the best state is of the actor that the step began with, and an update leads away from
    it: figures of training are; an evaluation is of the actor that the step made."""
    best = job.recipe.checkpoint.best
    is_trained = job.outlines.at(step).training("actor") is not None
    return best is not None and eval_set(best) is None and is_trained


@dataclass(frozen=True)
class _SaveBestBeforeUpdate:
    """The actor's update, which first keeps the actor it is given if that is the best so far and its figures stop
    nothing: all that measures it is committed by then, and afterwards its weights are gone."""

    update: Stage[State]
    job: RunContext
    step: int

    @property
    def name(self) -> str:
        return self.update.name

    @property
    def fingerprint(self) -> str:
        return self.update.fingerprint

    def run(self, actor: State, *inputs: Any) -> Record[State]:
        figures = self.job.journal.metrics(self.step)
        if not self.job.health.would_stop(self.step, figures):
            _save_best(self.job, actor, figures)
        return self.update.run(actor, *inputs)


def _save_best(job: RunContext, actor: State, figures: Mapping[str, float]) -> None:
    """Keep the weights of the actor that the figures are of, if they are among the best so far."""
    best = job.best
    if best is not None and best.metric in figures:
        best.offer(actor, figures[best.metric], lambda folder: job.states.actor_at(actor).save_weights(folder))
