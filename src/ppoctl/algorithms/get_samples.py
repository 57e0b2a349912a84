"""The first half of a step: the samples that it trains on. The second half, the step functions in `ppo` and
`policy_only`, is the same for every way of getting samples."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

from ppoctl.algorithms.generation_specs import NEXT_ROLLOUT, OLD_REWARD, REWARD, ROLLOUT
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
class OneStepAhead:
    """The responses that the step before generated with the weights before its update (`rollout.ahead`). Meanwhile,
    the engines generate those of the next step. The first step generates both."""

    is_first: bool

    @property
    def suffix(self) -> str:
        return "_ahead_first" if self.is_first else "_ahead"

    def __call__(self, run_stage: RunStage, inputs: StepInputs) -> Samples:
        actor = inputs.states["actor"]
        first = run_stage(ROLLOUT, actor, inputs.prompts) if self.is_first else None
        rollouts = inputs.previous(NEXT_ROLLOUT) if first is None else first
        run_stage.meanwhile(NEXT_ROLLOUT, actor, inputs.prompts_of(2))
        rewards = run_stage(REWARD if self.is_first else OLD_REWARD, inputs.prompts, rollouts)
        return Samples(rollouts, rewards, ((rollouts, rewards),))


@cache
def step_function(
    name: str, run: Callable[..., StepOutputs], get_samples: GetSamples, *settings: Hashable
) -> StepFunction:
    """Return the step function `run` with these samples, and with settings of its own."""
    return StepFunction(
        name + get_samples.suffix, lambda run_stage, inputs: run(run_stage, inputs, get_samples, *settings)
    )
