"""The first half of a step: the samples that it trains on. The second half, the step functions in `ppo` and
`policy_only`, is the same for every way of getting samples."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

from ppoctl.algorithms.generation_specs import (
    ENDED_GROUPS,
    LATER_ROLLOUT,
    NEXT_PARTIAL_ROLLOUT,
    NEXT_ROLLOUT,
    OLD_REWARD,
    PARTIAL_ROLLOUT,
    REWARD,
    ROLLOUT,
)
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs

if TYPE_CHECKING:
    from ppoctl.core.batch.records import Rewards, Rollouts


@dataclass(frozen=True)
class Samples:
    """The samples of a step."""

    rollouts: "Rollouts"
    """Responses that the step trains on."""
    rewards: "Rewards"
    generated: "tuple[tuple[Rollouts, Rewards], ...]"
    """All rollouts and rewards of each round of generation, for the ledger."""


class GetSamples(Protocol):
    """A way of getting the samples of a step. It compares equal to another one with the same settings."""

    @property
    def suffix(self) -> str:
        """End of the names of step functions that get their samples in this way."""

    def __call__(self, run_stage: RunStage, inputs: StepInputs) -> Samples:
        """Run the stages that generate and score the samples."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class OneRound:
    """One round of generation, of which every sample is used."""

    suffix: ClassVar[str] = ""

    def __call__(self, run_stage: RunStage, inputs: StepInputs) -> Samples:
        rollouts = run_stage(ROLLOUT, inputs.states["actor"], inputs.prompts)
        rewards = run_stage(REWARD, inputs.prompts, rollouts)
        return Samples(rollouts, rewards, ((rollouts, rewards),))


ONE_ROUND = OneRound()


@dataclass(frozen=True)
class StepsAhead:
    """The responses that an earlier step generated with the weights before its update (`rollout.ahead`). Meanwhile,
    the engines generate those of a later step. The first steps generate both."""

    steps: int
    """Number of steps between generation and training: 1, or 2, with which a generation may end in the next step."""
    is_first: bool

    @property
    def suffix(self) -> str:
        return "_ahead" + (f"_{self.steps}" if self.steps > 1 else "") + "_first" * self.is_first

    def __call__(self, run_stage: RunStage, inputs: StepInputs) -> Samples:
        actor, generates = inputs.states["actor"], NEXT_ROLLOUT if self.steps == 1 else LATER_ROLLOUT
        first = run_stage(ROLLOUT, actor, inputs.prompts) if self.is_first else None
        rollouts = inputs.previous(generates, self.steps) if first is None else first
        run_stage.meanwhile(generates, actor, inputs.prompts_of(1 + self.steps))
        rewards = run_stage(REWARD if self.is_first else OLD_REWARD, inputs.prompts, rollouts)
        return Samples(rollouts, rewards, ((rollouts, rewards),))


@dataclass(frozen=True)
class EndedGroups:
    """Groups whose last response ends in this step, or in the step before if `is_ahead`. A response has at most
    `rollout.tokens_per_step` tokens of each step (`stages.partial_rollout`)."""

    segments: int
    """Maximum number of steps that generate a response."""
    is_first: bool
    is_ahead: bool

    @property
    def suffix(self) -> str:
        return "_partial" + "_ahead" * self.is_ahead + "_first" * self.is_first

    def __call__(self, run_stage: RunStage, inputs: StepInputs) -> Samples:
        actor, prompts = inputs.states["actor"], inputs.prompts_of_last(self.segments)
        if self.is_ahead and not self.is_first:
            partial = inputs.previous(NEXT_PARTIAL_ROLLOUT)
        else:
            before = None if self.is_first else inputs.previous(PARTIAL_ROLLOUT)
            partial = run_stage(PARTIAL_ROLLOUT, actor, inputs.prompts, before)
        if self.is_ahead:
            run_stage.meanwhile(NEXT_PARTIAL_ROLLOUT, actor, inputs.prompts_of(2), partial)
        rollouts = run_stage(ENDED_GROUPS, partial)
        rewards = run_stage(REWARD, prompts, rollouts)
        return Samples(rollouts, rewards, ((rollouts, rewards),))


@cache
def step_function(
    name: str, run: Callable[..., StepOutputs], get_samples: GetSamples, *settings: Hashable
) -> StepFunction:
    """Return the step function `run` with these samples, and with settings of its own."""
    return StepFunction(
        name + get_samples.suffix, lambda run_stage, inputs: run(run_stage, inputs, get_samples, *settings)
    )
