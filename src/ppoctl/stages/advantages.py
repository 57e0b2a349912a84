"""50-advantages: the arithmetic of rewards, generalised advantages, whitening over the whole step."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch.records import Advantages, Carry, Logprobs, Rewards, Rollouts, Values
from ppoctl.ppo.advantages import gae
from ppoctl.ppo.masking import masked_mean, masked_variance, whiten
from ppoctl.stages.logprobs import KlPenalty
from ppoctl.stages.penalty import penalised
from ppoctl.stages.shaping import RewardStep, shape


@dataclass(frozen=True)
class AdvantagesStage:
    """What the updates read, from what the step has gathered."""

    reward_steps: tuple[RewardStep, ...]
    gamma: float
    gae_lambda: float
    whitened: bool
    penalty: KlPenalty | None
    """KL in the reward or in the loss; None: no reference."""
    fingerprint: str
    name: str = "advantages"

    def run(
        self, rollouts: Rollouts, rewards: Rewards, values: Values, logprobs: Logprobs, carry: Carry
    ) -> Advantages:
        mask = rollouts.mask & rewards.valid[:, None]
        earned = shape(rewards, rollouts, carry, self.reward_steps)
        kl = penalised(self.penalty, logprobs, mask, earned.carry)
        token_rewards = earned.per_token
        if kl.in_reward is not None:
            token_rewards = token_rewards - kl.in_reward
        raw, returns = gae(token_rewards, values.values, mask, gamma=self.gamma, lam=self.gae_lambda)
        carry = replace(
            earned.carry,
            kl_coef=kl.next_coef,
            trained_seqs=carry.trained_seqs + float(mask.any(1).sum()),
            trained_tokens=carry.trained_tokens + float(mask.sum()),
        )
        return Advantages(
            advantages=whiten(raw, mask) if self.whitened else raw,
            returns=returns,
            token_rewards=token_rewards,
            mask=mask,
            carry_out=carry.as_dict(),
            kl_coef=None if kl.coef == kl.next_coef else kl.coef,
            summary=earned.figures | _summary(raw, mask, carry) | kl.figures,
            shaped=earned.per_response,
        )


def _summary(raw: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], carry: Carry) -> dict[str, float]:
    return {
        metrics.ADVANTAGE_RAW_MEAN.name: float(masked_mean(raw, mask)),
        metrics.ADVANTAGE_RAW_STD.name: float(masked_variance(raw, mask).sqrt()),
        metrics.ADVANTAGE_RAW_ABS_MAX.name: float(raw.where(mask, 0.0).abs().max()),
        metrics.TRAINED_SEQS.name: carry.trained_seqs,
        metrics.TRAINED_TOKENS.name: carry.trained_tokens,
    }
