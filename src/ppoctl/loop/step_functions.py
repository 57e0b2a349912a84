"""The stories: what one step is, which roles it trains, and which story is told when.

A story is told to `once`, line by line. Told to a `once` that only writes down what it hears, it gives its own
outline; layout, resume, retention, replay and every screen ask that, and know no stage or role of their own.

Our differences from textbook PPO (Schulman et al. 2017; Ouyang et al. 2022):

1. The critic trains before the actor, each for its own number of epochs. Returns and advantages are fixed before
   either moves, so this equals the interleaved order and moves each model in and out once.
2. Every line is durable: `once` recalls what is committed and commits what it runs. There is no resume code.
3. Losses are sums over counted tokens over the minibatch's global count, so no memory setting changes a gradient.
4. The ratio's denominator is the trainer's own log-prob, not the generator's, unless `ppo.old_logprobs` says so.
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
    """The stages that a recipe describes. A story tells those it needs, and may bring others of its own."""

    rollout: "Stage[Rollouts]"
    reward: "Stage[Rewards]"
    values: "Stage[Values]"
    logprobs: "Stage[Logprobs]"
    correction: "Stage[Correction] | None"
    """None: the sampler's log-probs are trusted."""
    advantages: "Stage[Advantages]"
    critic_update: "Stage[State]"
    actor_update: "Stage[State]"


@dataclass(frozen=True)
class StepInputs:
    """What a step begins with."""

    prompts: "Prompts"
    states: "Mapping[str, State]"
    """Role -> the state it has when the step begins."""
    carry: "Carry"


@dataclass(frozen=True)
class StepOutputs:
    """Where a step leads, and what the ledger records of it."""

    states: "Mapping[str, State]"
    """The roles that were trained; the others stay as they were."""
    carry: "Carry"
    samples: "tuple[tuple[Rollouts, Rewards], ...]"
    """Each round of drawing, with its scores."""


class RunStage(Protocol):
    """Whoever a story is told to: the memory of a run, or somebody who only listens."""

    def __call__(self, stage: "Stage[Result]", *inputs: "Identified") -> "Result": ...


StepBody = Callable[[RunStage, Stages, StepInputs], StepOutputs]


@dataclass(frozen=True)
class StepFunction:
    """What a step is, and what it is called."""

    name: str
    run: StepBody


def _ppo(run_stage: RunStage, stages: Stages, inputs: StepInputs) -> StepOutputs:
    """Draw, score, judge, learn."""
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
    """PPO in which a token weighs in the actor's loss what the sampler's log-prob says."""
    assert stages.correction is not None, "a story that corrects needs the stage that does"
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
    """PPO in which the actor waits until the critic knows something."""
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
    """Which story a step tells. The critic may train alone for some steps; then the actor learns too, from corrected
    rollouts or plain ones."""
    if step <= recipe.ppo.critic_only_steps:
        return CRITIC_ONLY
    return PPO_CORRECTED if recipe.ppo.corrects_rollouts else PPO


def outline(step_function: StepFunction) -> Outline:
    """The lines of the story, heard by telling it once to nobody."""
    names: Any = _PlaceholderStages()
    recorded, outputs = _trace(step_function, names)
    trained = {str(state): role for role, state in outputs.states.items()}
    return Outline(
        step_function.name,
        tuple(OutlineEntry(stage.name, reads, trained.get(stage.name)) for stage, reads in recorded),
    )


def stage_of(step_function: StepFunction, stages: Stages, name: str) -> "Stage[Any]":
    """The stage that the story tells by this name. Raises KeyError when it tells none."""
    return {stage.name: stage for stage, _ in _trace(step_function, stages)[0]}[name]


def _trace(
    step_function: StepFunction, stages: Stages
) -> "tuple[list[tuple[Stage[Any], tuple[str, ...]]], StepOutputs]":
    """Each stage with the names of what it is given, and what the story ends with; nothing is run."""
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
    """What stands for a result while a story is only listened to: the name of what gave it."""

    name: str

    def __str__(self) -> str:
        return self.name

    def __getattr__(self, part: str) -> "_Placeholder":
        return self if not part.startswith("__") else super().__getattribute__(part)


class _PlaceholderStages:
    """Stages that are names only; `dataclasses.replace` may give them others."""

    def __getattr__(self, name: str) -> _Placeholder:
        return _Placeholder(name)


class _PlaceholderStates(dict[str, _Placeholder]):
    """Every role that is asked for is there."""

    def __missing__(self, role: str) -> _Placeholder:
        return _Placeholder(role)
