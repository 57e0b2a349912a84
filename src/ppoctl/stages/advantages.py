"""50-advantages: rewards per token, generalised advantages, whitening over the whole step."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch.records import Advantages, Carry, Logprobs, Rewards, Rollouts, Values
from ppoctl.ppo.advantages import gae
from ppoctl.ppo.masking import masked_mean, masked_variance, whiten
from ppoctl.ppo.rewards import terminal_rewards
from ppoctl.stages.logprobs import KlPenalty
from ppoctl.stages.penalty import penalised


@dataclass(frozen=True)
class AdvantagesStage:
    """What the updates read, from what the step has gathered."""

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
        kl = penalised(self.penalty, logprobs, mask, carry)
        token_rewards = terminal_rewards(rewards.shaped, mask)
        if kl.in_reward is not None:
            token_rewards = token_rewards - kl.in_reward
        raw, returns = gae(token_rewards, values.values, mask, gamma=self.gamma, lam=self.gae_lambda)
        return Advantages(
            advantages=whiten(raw, mask) if self.whitened else raw,
            returns=returns,
            token_rewards=token_rewards,
            mask=mask,
            carry_out=replace(carry, kl_coef=kl.next_coef).as_dict(),
            kl_coef=None if kl.coef == kl.next_coef else kl.coef,
            summary=_summary(raw, mask) | kl.figures,
        )


def _summary(raw: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> dict[str, float]:
    return {
        metrics.ADVANTAGE_RAW_MEAN.name: float(masked_mean(raw, mask)),
        metrics.ADVANTAGE_RAW_STD.name: float(masked_variance(raw, mask).sqrt()),
        metrics.ADVANTAGE_RAW_ABS_MAX.name: float(raw.where(mask, 0.0).abs().max()),
    }
