"""50-advantages: the arithmetic of rewards, generalised advantages, whitening over the whole step."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch.records import Advantages, Carry, Logprobs, Rewards, Rollouts, Values
from ppoctl.ppo.advantages import gae
from ppoctl.ppo.kl import kl_estimate
from ppoctl.ppo.masking import masked_mean, masked_variance, whiten
from ppoctl.stages.logprobs import KlPenalty, kl_figures, reference_of
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
        kl = self._kl(logprobs, mask)
        earned = shape(rewards, rollouts, carry, self.reward_steps)
        token_rewards = earned.per_token
        carry = self._next_carry(earned.carry)
        if kl is not None and self.penalty is not None and self.penalty.place == "reward":
            token_rewards = token_rewards - carry.kl_coef * kl
        raw, returns = gae(token_rewards, values.values, mask, gamma=self.gamma, lam=self.gae_lambda)
        return Advantages(
            advantages=whiten(raw, mask) if self.whitened else raw,
            returns=returns,
            token_rewards=token_rewards,
            mask=mask,
            carry_out=carry.as_dict(),
            summary=earned.figures | _summary(raw, mask, kl, carry),
            shaped=earned.per_response,
        )

    def _next_carry(self, carry: Carry) -> Carry:
        """A fixed coefficient is the recipe's at every step; one that adapts would be computed from `carry` here."""
        return replace(carry, kl_coef=0.0 if self.penalty is None else self.penalty.coef)

    def _kl(self, logprobs: Logprobs, mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"] | None:
        if self.penalty is None or logprobs.actor is None:
            return None
        kl = kl_estimate(logprobs.actor, reference_of(logprobs), kind=self.penalty.estimator)
        return kl.where(mask, 0.0)


def _summary(
    raw: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], kl: Float[Tensor, "B R"] | None, carry: Carry
) -> dict[str, float]:
    figures = {
        metrics.ADVANTAGE_RAW_MEAN.name: float(masked_mean(raw, mask)),
        metrics.ADVANTAGE_RAW_STD.name: float(masked_variance(raw, mask).sqrt()),
        metrics.ADVANTAGE_RAW_ABS_MAX.name: float(raw.where(mask, 0.0).abs().max()),
    }
    if kl is not None:
        figures |= kl_figures(kl, mask, carry.kl_coef)
    return figures
