"""What training sees of what a scorer gave: the steps of `[reward]`, one after another; part of 50-advantages.

Every step is a small class with the numbers of its table. Scores themselves are stored as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch.records import Carry, Rewards, Rollouts
from ppoctl.ppo.rewards import scaled, terminal_rewards


@dataclass(frozen=True)
class Earned:
    """Rewards on their way from scores to training."""

    rewards: Float[Tensor, " B"] | Float[Tensor, "B R"]
    """One for each response, or for each token; anything where there is no score."""
    rollouts: Rollouts
    valid: Bool[Tensor, " B"]
    """Responses that have a score."""
    carry: Carry
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def mask(self) -> Bool[Tensor, "B R"]:
        """Tokens that the actor chose in responses that have a score."""
        return self.rollouts.mask & self.valid[:, None]

    @property
    def per_token(self) -> Float[Tensor, "B R"]:
        """Rewards of tokens; one for a whole response stands at its last counted token."""
        if self.rewards.ndim == 1:
            return terminal_rewards(self.rewards, self.mask)
        return self.rewards.where(self.mask, 0.0)

    @property
    def per_response(self) -> Float[Tensor, " B"]:
        """What each response earned; 0 where there is no score."""
        if self.rewards.ndim == 1:
            return self.rewards.where(self.valid, 0.0)
        return self.per_token.sum(dim=1)


RewardStep = Callable[[Earned], Earned]
"""One step of the arithmetic."""


def shape(rewards: Rewards, rollouts: Rollouts, carry: Carry, steps: Sequence[RewardStep]) -> Earned:
    """Scores after all steps, with the figure of each step and the mean of what came out."""
    scores = rewards.scores if rewards.token_scores is None else rewards.token_scores
    earned = Earned(scores, rollouts, rewards.valid, carry)
    for step in steps:
        earned = step(earned)
    mean = {metrics.REWARD_SHAPED_MEAN.name: float(earned.per_response[earned.valid].mean())}
    return replace(earned, figures=earned.figures | mean)


@dataclass(frozen=True)
class Scale:
    """Clamps to `source`, then maps linearly to `target`."""

    source: tuple[float, float]
    target: tuple[float, float]

    def __call__(self, earned: Earned) -> Earned:
        return replace(earned, rewards=scaled(earned.rewards, source=self.source, target=self.target))
