"""Step functions: Python functions that define one PPO step, and the choice of the step function for each step.

A *step function* calls `run_stage(stage, *inputs)` once for each stage, in order. During training, `run_stage` is a
`store.stage_runner`: it returns the committed record of the stage if there is one; otherwise it runs the stage and
commits the record. Resuming a run therefore needs no code here: it calls the same step function again.

A *trace* calls the step function with placeholders and a `run_stage` that executes nothing and records the calls. The
result is the *outline*: the stages in order, what each reads, and which role it trains. The run directory, resume,
retention, replay and screens read the outline, so none of these contains a list of stages or roles.

Differences from textbook PPO (Schulman et al. 2017; Ouyang et al. 2022):

1. The critic trains before the actor, each for its own number of epochs. Returns and advantages are fixed before
   either update, so the result equals that of the interleaved order. Each model is reloaded and offloaded only once
   per step.
2. Every stage is durable: its record is on disk before the next stage starts.
3. A loss is a sum over unmasked tokens, divided by a count over the whole minibatch. Microbatch sizes therefore never
   change a gradient.
4. The denominator of the ratio is the trainer's own log-prob, not the generator's, unless `ppo.old_logprobs` selects
   another source.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import Outline, OutlineEntry

if TYPE_CHECKING:
    from ppoctl.batch.prompts import Prompts
    from ppoctl.batch.records import Advantages, Carry, Correction, Logprobs, Rewards, Rollouts, State, Values
    from ppoctl.store.stage_runner import Identified, Result, Stage


@dataclass(frozen=True)
class Stages:
    """Stages that a recipe describes. A step function runs the stages that it requires, and may add others."""

    rollout: "Stage[Rollouts]"
    reward: "Stage[Rewards]"
    values: "Stage[Values]"
    logprobs: "Stage[Logprobs]"
    correction: "Stage[Correction] | None"
    """Correction stage; None: sampler log-probs are not corrected."""
    advantages: "Stage[Advantages]"
    critic_update: "Stage[State]"
    actor_update: "Stage[State]"


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step."""

    prompts: "Prompts"
    states: "Mapping[str, State]"
    """Role -> its state at the beginning of the step."""
    carry: "Carry"


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of a step, and the samples that the ledger records."""

    states: "Mapping[str, State]"
    """States of the roles that were trained. The other roles are unchanged."""
    carry: "Carry"
    samples: "tuple[tuple[Rollouts, Rewards], ...]"
    """Rollouts and rewards of each round of generation."""


class RunStage(Protocol):
    """Callable that runs a stage or returns its committed record (`store.stage_runner`), or only records the call (a
    trace)."""

    def __call__(self, stage: "Stage[Result]", *inputs: "Identified") -> "Result": ...


StepBody = Callable[[RunStage, Stages, StepInputs], StepOutputs]


@dataclass(frozen=True)
class StepFunction:
    """Named definition of a step. The name is written to the outline."""

    name: str
    run: StepBody


def _ppo(run_stage: RunStage, stages: Stages, inputs: StepInputs) -> StepOutputs:
    """PPO: generate, score, compute advantages, update critic and actor."""
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    rollouts = run_stage(stages.rollout, actor, inputs.prompts)
    rewards = run_stage(stages.reward, inputs.prompts, rollouts)
    values = run_stage(stages.values, critic, rollouts)
    logprobs = run_stage(stages.logprobs, actor, rollouts)
    advantages = run_stage(stages.advantages, rollouts, rewards, values, logprobs, inputs.carry)
    critic = run_stage(stages.critic_update, critic, rollouts, values, advantages)
    actor = run_stage(stages.actor_update, actor, rollouts, logprobs, advantages)
    return StepOutputs({"critic": critic, "actor": actor}, advantages.carry, ((rollouts, rewards),))


def _ppo_corrected(run_stage: RunStage, stages: Stages, inputs: StepInputs) -> StepOutputs:
    """PPO with rollout correction: importance weights in the actor's loss correct for the sampler/trainer log-prob
    difference."""
    assert stages.correction is not None, "`ppo_corrected` requires the correction stage"
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    rollouts = run_stage(stages.rollout, actor, inputs.prompts)
    rewards = run_stage(stages.reward, inputs.prompts, rollouts)
    values = run_stage(stages.values, critic, rollouts)
    logprobs = run_stage(stages.logprobs, actor, rollouts)
    correction = run_stage(stages.correction, rollouts, logprobs)
    advantages = run_stage(stages.advantages, rollouts, rewards, values, logprobs, inputs.carry)
    critic = run_stage(stages.critic_update, critic, rollouts, values, advantages)
    actor = run_stage(stages.actor_update, actor, rollouts, logprobs, advantages, correction)
    return StepOutputs({"critic": critic, "actor": actor}, advantages.carry, ((rollouts, rewards),))


def _critic_only(run_stage: RunStage, stages: Stages, inputs: StepInputs) -> StepOutputs:
    """PPO without the actor update: it warms up the critic before the critic's values train the actor."""
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    rollouts = run_stage(stages.rollout, actor, inputs.prompts)
    rewards = run_stage(stages.reward, inputs.prompts, rollouts)
    values = run_stage(stages.values, critic, rollouts)
    logprobs = run_stage(stages.logprobs, actor, rollouts)
    advantages = run_stage(stages.advantages, rollouts, rewards, values, logprobs, inputs.carry)
    critic = run_stage(stages.critic_update, critic, rollouts, values, advantages)
    return StepOutputs({"critic": critic}, advantages.carry, ((rollouts, rewards),))


PPO = StepFunction("ppo", _ppo)
PPO_CORRECTED = StepFunction("ppo_corrected", _ppo_corrected)
CRITIC_ONLY = StepFunction("critic_only", _critic_only)


def step_function_at(recipe: Recipe, step: int) -> StepFunction:
    """Return the step function of a step: critic only for the first `critic_only_steps`, then PPO with or without
    correction."""
    if step <= recipe.ppo.critic_only_steps:
        return CRITIC_ONLY
    return PPO_CORRECTED if recipe.ppo.corrects_rollouts else PPO


def outline(step_function: StepFunction) -> Outline:
    """Trace the step function with placeholder inputs and return its stages in order."""
    names: Any = _PlaceholderStages()
    recorded, outputs = _trace(step_function, names)
    trained = {str(state): role for role, state in outputs.states.items()}
    return Outline(
        step_function.name,
        tuple(OutlineEntry(stage.name, reads, trained.get(stage.name)) for stage, reads in recorded),
    )


def stage_of(step_function: StepFunction, stages: Stages, name: str) -> "Stage[Any]":
    """Return the stage that the step function runs under this name. Raises KeyError if it runs no such stage."""
    return {stage.name: stage for stage, _ in _trace(step_function, stages)[0]}[name]


def _trace(
    step_function: StepFunction, stages: Stages
) -> "tuple[list[tuple[Stage[Any], tuple[str, ...]]], StepOutputs]":
    """Call the step function without running a stage. Return each stage with its input names, and the step
    outputs."""
    recorded: list[tuple[Any, tuple[str, ...]]] = []

    def run_stage(stage: Any, *inputs: Any) -> Any:
        recorded.append((stage, tuple(map(str, inputs))))
        return _Placeholder(stage.name)

    stand_in: Any = _Placeholder
    states: Any = _PlaceholderStates()
    inputs = StepInputs(prompts=stand_in("prompts"), states=states, carry=stand_in("carry"))
    return recorded, step_function.run(run_stage, stages, inputs)


@dataclass(frozen=True)
class _Placeholder:
    """Stand-in for a record during a trace, named after the stage or input that produced the record. Every attribute
    is the placeholder itself."""

    name: str

    def __str__(self) -> str:
        return self.name

    def __getattr__(self, part: str) -> "_Placeholder":
        return self if not part.startswith("__") else super().__getattribute__(part)


class _PlaceholderStages:
    """Stages for a trace, with the attribute names as stage names. Constructing this object requires no recipe."""

    def __getattr__(self, name: str) -> _Placeholder:
        return _Placeholder(name)


class _PlaceholderStates(dict[str, _Placeholder]):
    """Role states for a trace: any role can be looked up."""

    def __missing__(self, role: str) -> _Placeholder:
        return _Placeholder(role)
