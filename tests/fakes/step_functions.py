"""Step functions that ppoctl does not contain. Code that gets only the outline of a run must handle them."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ppoctl.algorithms.advantages_spec import ADVANTAGES
from ppoctl.algorithms.forward_specs import LOGPROBS, VALUES
from ppoctl.algorithms.generation_specs import REWARD, ROLLOUT
from ppoctl.algorithms.stage_spec import StageParts, StageSpec
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ACTOR_UPDATE, CRITIC_UPDATE
from ppoctl.core.batch.records import Advantages, Carry, Rewards, Rollouts
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class GroupAdvantages:
    """Each score minus the mean score of the same prompt's samples, at every unmasked token."""

    fingerprint: str
    name: str

    def run(self, rollouts: Rollouts, rewards: Rewards, carry: Carry) -> Advantages:
        mask = rollouts.mask & rewards.valid[:, None]
        prompts = torch.tensor([rollouts.prompt_ids.index(name) for name in rollouts.prompt_ids])
        scores = rewards.scores.where(rewards.valid, 0.0)
        ones = rewards.valid.float()
        sums, counts = (torch.zeros(len(prompts)).index_add(0, prompts, values) for values in (scores, ones))
        advantages = (scores - (sums / counts.clamp(min=1.0))[prompts])[:, None] * mask
        return Advantages(
            advantages=advantages,
            returns=torch.zeros_like(advantages),
            token_rewards=torch.zeros_like(advantages),
            mask=mask,
            carry_out=carry.as_dict(),
            summary={},
        )


@dataclass(frozen=True)
class GroupAdvantagesSpec(StageSpec[Advantages]):
    kind: ClassVar[str] = "advantages"

    def build(self, recipe: Recipe, parts: StageParts) -> GroupAdvantages:
        return GroupAdvantages(self.fingerprint(recipe), self.name)


GROUP_ADVANTAGES = GroupAdvantagesSpec("group_advantages")


def _no_critic(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    """Run a step without a critic: samples of one prompt are compared with each other."""
    actor = inputs.states["actor"]
    rollouts = run_stage(ROLLOUT, actor, inputs.prompts)
    rewards = run_stage(REWARD, inputs.prompts, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(GROUP_ADVANTAGES, rollouts, rewards, inputs.carry)
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages)
    return StepOutputs({"actor": actor}, advantages.carry, ((rollouts, rewards),))


def _two_rounds(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    """Run two rounds: the critic trains on the first; its values of the second are used to train the actor."""
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    rollouts = run_stage(ROLLOUT, actor, inputs.prompts)
    rewards = run_stage(REWARD, inputs.prompts, rollouts)
    values = run_stage(VALUES, critic, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, values, logprobs, inputs.carry)
    critic = run_stage(CRITIC_UPDATE, critic, rollouts, values, advantages)
    second_rollouts = run_stage(_second(ROLLOUT), actor, inputs.prompts)
    scores = run_stage(_second(REWARD), inputs.prompts, second_rollouts)
    values = run_stage(_second(VALUES), critic, second_rollouts)
    logprobs = run_stage(_second(LOGPROBS), actor, second_rollouts)
    advantages = run_stage(_second(ADVANTAGES), second_rollouts, scores, values, logprobs, advantages.carry)
    actor = run_stage(ACTOR_UPDATE, actor, second_rollouts, logprobs, advantages)
    return StepOutputs(
        {"critic": critic, "actor": actor}, advantages.carry, ((rollouts, rewards), (second_rollouts, scores))
    )


def _second(stage: Any) -> Any:
    return replace(stage, name=f"{stage.name}.2")


NO_CRITIC = StepFunction("no_critic", _no_critic)
TWO_ROUNDS = StepFunction("two_rounds", _two_rounds)
