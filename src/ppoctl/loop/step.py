"""The story: one PPO step.

Our differences from textbook PPO (Schulman et al. 2017; Ouyang et al. 2022):

1. The critic trains before the actor, each for its own number of epochs. Returns and advantages are fixed before
   either moves, so this equals the interleaved order and moves each model in and out once.
2. Every line is durable: `once` recalls what is committed and commits what it runs. There is no resume code.
3. Losses are sums over counted tokens over the minibatch's global count, so no memory setting changes a gradient.
4. The ratio's denominator is the trainer's own log-prob, not the generator's.
"""

from dataclasses import dataclass, replace

from ppoctl.batch.records import Advantages, Carry, Logprobs, Prompts, Rewards, Rollouts, State, Values
from ppoctl.store.once import OnceAt, Stage


@dataclass(frozen=True)
class Stages:
    """The stages of a step; a variant of the algorithm is another value of one of them."""

    rollout: Stage[Rollouts]
    reward: Stage[Rewards]
    values: Stage[Values]
    logprobs: Stage[Logprobs]
    advantages: Stage[Advantages]
    critic_update: Stage[State]
    actor_update: Stage[State]


@dataclass(frozen=True)
class StepResult:
    """Where a step leads, and what the ledger records of it."""

    actor: State
    critic: State
    carry: Carry
    rollouts: Rollouts
    rewards: Rewards


def ppo_step(once: OnceAt, stages: Stages, prompts: Prompts, actor: State, critic: State, carry: Carry) -> StepResult:
    """One PPO step: draw, score, judge, learn."""
    rollouts = once(stages.rollout, actor, prompts)
    rewards = once(stages.reward, rollouts)
    values = once(stages.values, critic, rollouts)
    logprobs = once(stages.logprobs, actor, rollouts)
    advantages = once(stages.advantages, rollouts, rewards, values, logprobs, carry)
    critic = once(stages.critic_update, critic, rollouts, values, advantages)
    actor = once(stages.actor_update, actor, rollouts, logprobs, advantages)
    return StepResult(actor, critic, advantages.carry, rollouts, rewards)


def critic_only_step(
    once: OnceAt, stages: Stages, prompts: Prompts, actor: State, critic: State, carry: Carry
) -> StepResult:
    """The same without the last line: the actor waits until the critic knows something."""
    rollouts = once(stages.rollout, actor, prompts)
    rewards = once(stages.reward, rollouts)
    values = once(stages.values, critic, rollouts)
    logprobs = once(stages.logprobs, actor, rollouts)
    advantages = once(stages.advantages, rollouts, rewards, values, logprobs, carry)
    critic = once(stages.critic_update, critic, rollouts, values, advantages)
    return StepResult(replace(actor, step=actor.step + 1), critic, advantages.carry, rollouts, rewards)
