"""50-advantages: the arithmetic of rewards, generalised advantages, whitening over the whole step."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch.records import Advantages, Carry, Logprobs, Rewards, Rollouts, Values
from ppoctl.errors import RewardError
from ppoctl.ppo.masking import masked_mean, masked_variance, whiten
from ppoctl.ppo.rewards import bootstrapped
from ppoctl.stages.estimators import Estimator
from ppoctl.stages.logprobs import KlPenalty
from ppoctl.stages.penalty import penalised
from ppoctl.stages.shaping import ShapedRewards, ShapingStep, apply_shaping
from ppoctl.stages.values import Truncated, bootstrap_values


@dataclass(frozen=True)
class AdvantagesStage:
    """What the updates read, from what the step has gathered."""

    reward_steps: tuple[ShapingStep, ...]
    estimator: Estimator
    whitened: bool
    truncated: Truncated
    penalty: KlPenalty | None
    """KL in the reward or in the loss; None: no reference."""
    fingerprint: str
    name: str = "advantages"

    def run(
        self, rollouts: Rollouts, rewards: Rewards, values: Values, logprobs: Logprobs, carry: Carry
    ) -> Advantages:
        earned = apply_shaping(rewards, rollouts, carry, self.reward_steps)
        mask, figures = self._counted(earned)
        kl = penalised(self.penalty, logprobs, mask, earned.carry)
        token_rewards = earned.per_token.where(mask, 0.0)
        if kl.in_reward is not None:
            token_rewards = token_rewards - kl.in_reward
        goes_on = token_rewards
        if self.truncated == "bootstrap":
            behind = bootstrap_values(values).where(earned.valid, 0.0)
            goes_on = bootstrapped(token_rewards, behind, mask, gamma=self.estimator.gamma)
            figures[metric_registry.ADVANTAGE_BOOTSTRAP_MEAN.name] = earned.mean(behind)
        found = self.estimator(goes_on, values.values, mask)
        raw = found.advantages
        carry = replace(
            earned.carry,
            kl_coef=kl.next_coef,
            kl_first_coef=0.0 if self.penalty is None else self.penalty.first_coef,
            trained_seqs=carry.trained_seqs + float(mask.any(1).sum()),
            trained_tokens=carry.trained_tokens + float(mask.sum()),
        )
        return Advantages(
            advantages=whiten(raw, mask) if self.whitened else raw,
            returns=found.returns,
            token_rewards=token_rewards,
            mask=mask,
            carry_out=carry.as_dict(),
            kl_coef=None if kl.coef == kl.next_coef else kl.coef,
            summary=earned.metrics | figures | found.metrics | _summary(raw, mask, carry) | kl.metrics,
            shaped=earned.per_response,
        )

    def _counted(self, earned: ShapedRewards) -> tuple[Bool[Tensor, "B R"], dict[str, float]]:
        """Tokens that train, and what is left out. Raises RewardError where nothing is left."""
        if self.truncated != "filter":
            return earned.mask, {}
        mask = earned.mask & ~earned.truncated[:, None]
        if not bool(mask.any()):
            raise RewardError(
                f"all {int(earned.valid.sum())} scored responses of step {earned.rollouts.step} are truncated, and "
                "`ppo.truncated` = `filter` leaves them out: there is nothing to learn from",
                hint="ppoctl resume RUN --set ppo.truncated=terminal",
            )
        return mask, {metric_registry.ADVANTAGE_FILTERED_FRAC.name: earned.mean(earned.truncated.float())}


def _summary(raw: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], carry: Carry) -> dict[str, float]:
    return {
        metric_registry.ADVANTAGE_RAW_MEAN.name: float(masked_mean(raw, mask)),
        metric_registry.ADVANTAGE_RAW_STD.name: float(masked_variance(raw, mask).sqrt()),
        metric_registry.ADVANTAGE_RAW_ABS_MAX.name: float(raw.where(mask, 0.0).abs().max()),
        metric_registry.TRAINED_SEQS.name: carry.trained_seqs,
        metric_registry.TRAINED_TOKENS.name: carry.trained_tokens,
    }
