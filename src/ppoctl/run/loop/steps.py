"""The loop over steps, shared by `train` and `resume`: run the step function, write the ledger, evaluate, check
health rules, save, and delete superseded states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from ppoctl.algorithms.evaluation_spec import EVALUATION
from ppoctl.algorithms.stage_spec import StageSpec
from ppoctl.algorithms.trace import StepFunction, StepInputs, StepOutputs
from ppoctl.core.batch.prompts import Prompts
from ppoctl.core.batch.records import Carry, Record, State
from ppoctl.core.errors import (
    FinishedShortError,
    HealthStopError,
    InterruptedByUserError,
    PpoctlError,
    PreemptedError,
)
from ppoctl.core.metric_registry import eval_set
from ppoctl.recipe.cadence import evaluates, saves
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.early_end import early_end
from ppoctl.run.loop.run_stage import RunningStep, StageAround, records_before
from ppoctl.store.best import BestStates
from ppoctl.store.jobs import resume_command
from ppoctl.store.journal import Journal
from ppoctl.store.ledger import Ledger
from ppoctl.store.outline import Outlines
from ppoctl.store.parallel_run import ParallelRuns
from ppoctl.store.retention import Retention, healthy_steps
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import Stage, StageRunner
from ppoctl.store.states import Recorded, States, saved_state


@runtime_checkable
class Alarm(Protocol):
    """Health rule that a step broke."""

    @property
    def action(self) -> str: ...

    @property
    def text(self) -> str: ...


@runtime_checkable
class Health(Protocol):
    """Health rules of the recipe. The object counts, for each rule, the consecutive steps that broke the rule."""

    def replay(self, history: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Count the recorded steps up to the step that the run resumes from."""
        ...

    def check(self, step: int, metrics: Mapping[str, float]) -> Sequence[Alarm]: ...

    def would_stop(self, step: int, metrics: Mapping[str, float]) -> bool: ...


class PromptsOf(Protocol):
    """Source of prompts."""

    def __call__(self, step: int, batch: int | None = None) -> Prompts:
        """Return a batch of prompts for a step, by default batch `step - 1`. Batches count from 0 over the run."""
        ...


@dataclass(frozen=True)
class RunContext:
    """Everything that the loop needs, constructed by `wire`."""

    paths: RunPaths
    recipe: Recipe
    """The newest recipe. The step function and the stages of a step come from the recipe that was valid at that
    step."""
    runner: StageRunner
    journal: Journal
    ledger: Ledger
    states: States
    retention: Retention
    best: BestStates | None
    """The best actors so far; None: the best actor is not kept."""
    health: Health
    policy: str
    """Role that generates, is evaluated, and is kept as the best."""
    step_function: Callable[[int], StepFunction]
    outlines: Outlines
    build: Callable[[int, StageSpec[Any]], Stage[Any]]
    """(step, spec) -> stage. A setting that was changed during the run holds from the step of the change on."""
    prompts: PromptsOf
    notify: Callable[[str], None]


def run(job: RunContext) -> None:
    """Run the remaining steps.

    Raises HealthStopError if a rule with `action = "stop"` is broken, FinishedShortError if some steps are not on
    disk at the end, or the error that stopped a stage. Everything that was committed remains. Open saves are
    committed when the run ends or must stop. On a stop, states that are only in memory are saved too, if enough time
    is left. After any other error, the next attempt replays these states from the redo log.
    """
    done, parallel = CompletedStep(*start_point(job)), ParallelRuns()
    try:
        with parallel.cancelled_if_it_fails():
            _do_steps(job, done, parallel)
    except (PreemptedError, InterruptedByUserError):
        job.states.saves.finish()
        if job.runner.gate.may_save():
            _save_at_stop(job, done, parallel)
        raise
    job.states.saves.finish()
    job.retention.apply()
    _require_the_last_step(job)
    job.retention.drop_all_kept_at_stop()


def _require_the_last_step(job: RunContext) -> None:
    """Raise FinishedShortError if the newest saved step is not the last step of the recipe, and does not end the run
    early.

    An incomplete run must not look like a complete run.
    """
    reached, planned = last_saved(job), job.recipe.steps
    if reached < planned and ended_early(job, reached) is None:
        raise FinishedShortError(
            f"the run ended at its newest saved step {reached}, but `steps` is {planned}",
            hint=resume_command(job.paths.root),
        )


def ended_early(job: RunContext, step: int) -> str | None:
    """Return the values that end the run after this step, before its last step, as text; None: it does not end
    early."""
    return early_end(job.recipe, step, job.journal.metrics)


def last_saved(job: RunContext) -> int:
    """Return the newest step whose states are saved for all roles; 0: none."""
    return max(job.paths.saved_steps(*job.outlines.roles), default=0)


@dataclass
class CompletedStep:
    """The last completed step, including its save, and the states and carry after this step."""

    step: int
    states: Mapping[str, State]
    carry: Carry


def _do_steps(job: RunContext, done: CompletedStep, parallel: ParallelRuns) -> None:
    step, states, carry = done.step, done.states, done.carry
    # Replay only up to the saved step: later steps run again and are then checked again.
    job.health.replay(job.journal.history(up_to=step))
    if step == 0:
        _evaluate(job, 0, states[job.policy], parallel)
    while step < job.recipe.steps and ended_early(job, step) is None:
        step += 1
        outputs = job.step_function(step).run(running_step(job, step, parallel), inputs_of(job, step, states, carry))
        # A stage ends in its step, or in the step before the one that reads it.
        parallel.finish(up_to=step + 1 - max(1, job.outlines.reaches_back))
        used_by = _used_by(outputs, states)
        untrained = {role: replace(state, step=step) for role, state in states.items() if role not in outputs.states}
        states = {**outputs.states, **untrained}
        carry = replace(outputs.carry, further_rounds=carry.further_rounds + outputs.rounds - 1)
        # The ledger is written before the save, because the save stores the size of the ledger after this step.
        job.ledger.record(step, outputs.samples, used_by)
        _evaluate(job, step, states[job.policy], parallel)
        _check_and_save(job, step, states, carry, parallel)
        # `done` changes last, because a stop saves it: it must never be a step whose evaluation or save is missing.
        done.step, done.states, done.carry = step, states, carry
    if (reason := ended_early(job, step)) is not None:
        job.notify(f"the run ends after step {step} of {job.recipe.steps}: {reason}")


def inputs_of(job: RunContext, step: int, states: Mapping[str, State], carry: Carry) -> StepInputs:
    """Return the inputs of a step."""

    def prompts_of(number: int) -> Prompts:
        return job.prompts(step, carry.batch(step, number))

    def prompts_of_last(steps: int) -> Prompts:
        batches = range(max(0, carry.batch(step) - steps + 1), carry.batch(step) + 1)
        return Prompts(step, tuple(row for batch in batches for row in job.prompts(step, batch).rows))

    return StepInputs(states, carry, prompts_of, prompts_of_last, records_before(job.paths, step))


def running_step(job: RunContext, step: int, parallel: ParallelRuns) -> RunningStep:
    """Return `run_stage` of a step. The policy update first saves its input if the metric of `checkpoint.best`
    measures that state. `parallel` are the stages that run beside others."""
    entry = job.outlines.at(step).training(job.policy)

    def build(spec: StageSpec[Any]) -> Stage[Any]:
        stage = job.build(step, spec)
        saves_first = entry is not None and spec.name == entry.name and _is_measured_before_the_update(job, step)
        return _SaveBestBeforeUpdate(stage, job, step) if saves_first else stage

    return RunningStep(job.runner.at(step), build, parallel)


def _save_at_stop(job: RunContext, done: CompletedStep, parallel: ParallelRuns) -> None:
    """Save the states that are in memory before the job stops.

    If all trainers are at the last completed step, save its states, so that the next attempt resumes there.
    Otherwise, save each trainer's state separately, so that the next attempt loads it instead of replaying. This is
    also done if a generation of that step has not ended, because it needs earlier weights. A failure to save does not
    change the stop.
    """
    open_step = parallel.first_open_step
    is_complete = done.step > 0 and (open_step is None or open_step > done.step)
    try:
        job.retention.apply()
        if is_complete and all(job.states.is_at(state) for state in done.states.values()):
            lines = replace(_recorded(job, done.step), at_stop=True)
            _save(job, done, lines, healthy=True)
            job.states.saves.finish()
        job.states.keep_residents()
    except (PreemptedError, InterruptedByUserError):
        raise
    except (PpoctlError, RuntimeError, MemoryError) as error:  # torch raises the last two
        job.notify(f"the states in memory could not be saved: {error}")


def start_point(job: RunContext) -> tuple[int, dict[str, State], Carry]:
    """Return the newest step whose states are saved for all roles, with these states and the carry; step 0 if there
    is none."""
    step = last_saved(job)
    if step == 0:
        return 0, dict(job.states.initial), Carry(kl_coef=0.0)
    saved = {role: saved_state(job.paths, role, step) for role in job.outlines.roles}
    return step, {role: state for role, (state, _) in saved.items()}, saved[job.policy][1]


def _used_by(outputs: StepOutputs, before: Mapping[str, State]) -> dict[str, str]:
    """Return role -> lineage of the state that was trained on the step's samples. An update without optimizer steps
    leaves the lineage unchanged."""
    trained = {role: state for role, state in outputs.states.items() if state.lineage != before[role].lineage}
    return {role: state.lineage[:16] for role, state in trained.items()}


def _evaluate(job: RunContext, step: int, policy: State, parallel: ParallelRuns) -> None:
    # Without the evaluation, `ended_early` is true only if `[until]` has no metric of an evaluation.
    if evaluates(job.recipe, step, ends_early=ended_early(job, step) is not None):
        parallel.finish()
        job.runner.at(step)(job.build(step, EVALUATION), policy)


def _check_and_save(
    job: RunContext, step: int, states: Mapping[str, State], carry: Carry, parallel: ParallelRuns
) -> None:
    metrics = job.journal.metrics(step)
    alarms = job.health.check(step, metrics)
    for alarm in alarms:
        job.notify(f"{alarm.action}: {alarm.text}")
    stops = [alarm.text for alarm in alarms if alarm.action == "stop"]
    if not stops and not _is_measured_before_the_update(job, step):
        _save_best(job, states[job.policy], metrics)
    if _saves(job, step) or stops:
        parallel.finish()  # a run that continues from the saved states has no earlier weights
        # Finish earlier saves first: `apply` can then delete superseded states before the new states need the space.
        job.states.saves.finish()
        job.retention.apply()
        for state in states.values():
            job.states.take_up(state)
        # Drop these states before the new states are written: the disk may not have space for both.
        job.retention.drop_kept_at_stop(step)
        _save(job, CompletedStep(step, states, carry), _recorded(job, step), healthy=not stops)
    if stops:
        job.states.saves.finish()
        raise HealthStopError("; ".join(stops), hint=_after_health_stop(job))
    job.retention.apply()


def _saves(job: RunContext, step: int) -> bool:
    return saves(job.recipe, step, ends_early=ended_early(job, step) is not None)


def _recorded(job: RunContext, step: int) -> Recorded:
    return Recorded(job.journal.seq, job.ledger.end_of(step))


def _save(job: RunContext, done: CompletedStep, lines: Recorded, *, healthy: bool) -> None:
    for state in done.states.values():
        job.states.save(state, done.carry, job.journal.metrics(done.step), lines, healthy=healthy)


def _after_health_stop(job: RunContext) -> str:
    """Return the hint of the error that a health rule raises: resume from the last healthy states, or from the states
    that were saved when the rule stopped the run."""
    healthy = healthy_steps(job.paths, job.outlines.roles)
    resume = resume_command(job.paths.root)
    if not healthy:
        return f"everything up to this step is committed; resume from here, perhaps with changed keys: {resume}"
    back = f"{resume} --back-to {healthy[-1]}"
    return f"resume from the last healthy states: {back}; or from the newest states: {resume}"


def _is_measured_before_the_update(job: RunContext, step: int) -> bool:
    """Whether the metric of `checkpoint.best` measures the policy before its update, and the step updates the policy.

    Training metrics measure the policy before the update; evaluation metrics measure the policy after the update.
    """
    best = job.recipe.checkpoint.best
    is_trained = job.outlines.at(step).training(job.policy) is not None
    return best is not None and eval_set(best) is None and is_trained


@dataclass(frozen=True)
class _SaveBestBeforeUpdate(StageAround):
    """Policy update that first saves the weights of its input, if that state is the best so far and no health rule
    would stop the run.

    The save must come before the update: every metric of that state is committed by then, and the update overwrites
    its weights.
    """

    job: RunContext
    step: int

    def run(self, policy: State, *inputs: Any) -> Record[State]:
        metrics = self.job.journal.metrics(self.step)
        if not self.job.health.would_stop(self.step, metrics):
            _save_best(self.job, policy, metrics)
        record: Record[State] = self.stage.run(policy, *inputs)
        return record


def _save_best(job: RunContext, policy: State, metrics: Mapping[str, float]) -> None:
    """Keep the weights of the policy that `metrics` measure, if they are among the best so far."""
    best = job.best
    if best is not None and best.metric in metrics:
        best.offer(policy, metrics[best.metric], lambda folder: job.states.actor_at(policy).save_weights(folder))
