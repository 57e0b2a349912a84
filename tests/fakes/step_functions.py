"""Stories that the product does not tell: whoever knows a run only by its outline must serve them as they are."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ppoctl.batch.records import Advantages, Carry, Rewards, Rollouts
from ppoctl.loop.step_functions import RunStage, Stages, StepFunction, StepInputs, StepOutputs


@dataclass(frozen=True)
class GroupAdvantages:
    """Each score less the mean score of its prompt's samples, at every counted token."""

    fingerprint: str = "of no recipe"
    name: str = "group_advantages"

    def run(self, rollouts: Rollouts, rewards: Rewards, carry: Carry) -> Advantages:
        mask = rollouts.mask & rewards.valid[:, None]
        prompts = torch.tensor([rollouts.prompt_ids.index(name) for name in rollouts.prompt_ids])
        scores = rewards.scores.where(rewards.valid, 0.0)
        ones = rewards.valid.float()
        sums, counts = (torch.zeros(len(prompts)).index_add(0, prompts, each) for each in (scores, ones))
        advantages = (scores - (sums / counts.clamp(min=1.0))[prompts])[:, None] * mask
        return Advantages(
            advantages=advantages,
            returns=torch.zeros_like(advantages),
            token_rewards=torch.zeros_like(advantages),
            mask=mask,
            carry_out=carry.as_dict(),
            summary={},
        )


def _no_critic(once: RunStage, stages: Stages, given: StepInputs) -> StepOutputs:
    """Samples of one prompt are judged against each other."""
    actor = given.states["actor"]
    rollouts = once(stages.rollout, actor, given.prompts)
    rewards = once(stages.reward, given.prompts, rollouts)
    logprobs = once(stages.logprobs, actor, rollouts)
    advantages = once(GroupAdvantages(), rollouts, rewards, given.carry)
    actor = once(stages.actor_update, actor, rollouts, logprobs, advantages)
    return StepOutputs({"actor": actor}, advantages.carry, ((rollouts, rewards),))


def _two_rounds(once: RunStage, stages: Stages, given: StepInputs) -> StepOutputs:
    """The critic learns from a first round, and judges the second one, from which the actor learns."""
    actor, critic = given.states["actor"], given.states["critic"]
    rollouts = once(stages.rollout, actor, given.prompts)
    rewards = once(stages.reward, given.prompts, rollouts)
    values = once(stages.values, critic, rollouts)
    logprobs = once(stages.logprobs, actor, rollouts)
    advantages = once(stages.advantages, rollouts, rewards, values, logprobs, given.carry)
    critic = once(stages.critic_update, critic, rollouts, values, advantages)
    again = once(_second(stages.rollout), actor, given.prompts)
    scores = once(_second(stages.reward), given.prompts, again)
    values = once(_second(stages.values), critic, again)
    logprobs = once(_second(stages.logprobs), actor, again)
    advantages = once(_second(stages.advantages), again, scores, values, logprobs, advantages.carry)
    actor = once(stages.actor_update, actor, again, logprobs, advantages)
    return StepOutputs({"critic": critic, "actor": actor}, advantages.carry, ((rollouts, rewards), (again, scores)))


def _second(stage: Any) -> Any:
    return replace(stage, name=f"{stage.name}.2")


NO_CRITIC = StepFunction("no_critic", _no_critic)
TWO_ROUNDS = StepFunction("two_rounds", _two_rounds)
