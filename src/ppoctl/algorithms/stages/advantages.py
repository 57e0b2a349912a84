"""50-advantages: reward shaping, advantage estimation, and whitening over the whole step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl.algorithms.formulas.estimator import AdvantageEstimate, Estimator, EstimatorInputs
from ppoctl.algorithms.formulas.masking import masked_mean, masked_variance, whiten
from ppoctl.algorithms.formulas.rewards import bootstrapped, with_unit_variance
from ppoctl.algorithms.stages.critic_first import CriticFirst
from ppoctl.algorithms.stages.logprobs import KlPenalty, kl_metrics
from ppoctl.algorithms.stages.shaping import ShapedRewards, ShapingStep, apply_shaping
from ppoctl.algorithms.stages.values import Truncated, bootstrap_values, values_of
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import Advantages, Carry, Logprobs, Rewards, Rollouts, Values
from ppoctl.core.batch.update import step_of
from ppoctl.core.errors import RewardError


@dataclass(frozen=True)
class AdvantagesStage:
    """Stage that computes, from the records of the step, the inputs of both updates."""

    reward_steps: tuple[ShapingStep, ...]
    estimator: Estimator
    whitened: bool
    truncated: Truncated
    penalty: KlPenalty | None
    """KL penalty in the reward or in the loss; None: no reference model."""
    fingerprint: str
    critic_first: CriticFirst | None = None
    """Condition under which the step trains the actor; None: it always does."""
    reports_metrics: bool = True
    whitens_rewards: bool = False
    """Whether token rewards, with a KL penalty, are scaled to unit variance."""
    name: str = "advantages"
    component_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each component of the reward; empty if the estimator does not read components."""

    def run(
        self, rollouts: Rollouts, rewards: Rewards, values: Values | None, logprobs: Logprobs, carry: Carry
    ) -> Advantages:
        """Return the advantages. `values` is None if the step has no critic, or if `logprobs` contains the values."""
        if values is None and logprobs.values is not None:
            values = values_of(logprobs)
        return self.of_shaped(apply_shaping(rewards, rollouts, carry, self.reward_steps), rewards, values, logprobs)

    def of_shaped(
        self,
        shaped: ShapedRewards,
        rewards: Rewards,
        values: Values | None,
        logprobs: Logprobs,
        baselines: Float[Tensor, " B"] | None = None,
    ) -> Advantages:
        """Return the advantages of shaped rewards."""
        mask, metrics = self._training_mask(shaped)
        kl = _penalised(self.penalty, logprobs, mask, shaped.carry)
        token_rewards = shaped.per_token.where(mask, 0.0)
        if kl.in_reward is not None:
            token_rewards = token_rewards - kl.in_reward
        if self.whitens_rewards:
            token_rewards = with_unit_variance(token_rewards, mask)
        bootstrapped_rewards = token_rewards
        if self.truncated == "bootstrap":
            assert values is not None, "bootstrap values come from a critic, and the step has none"
            bootstrap = bootstrap_values(values).where(shaped.valid, 0.0)
            bootstrapped_rewards = bootstrapped(token_rewards, bootstrap, mask, gamma=self.estimator.gamma)
            metrics[metric_registry.ADVANTAGE_BOOTSTRAP_MEAN.name] = shaped.mean(bootstrap)
        estimate = self.estimator(
            EstimatorInputs(
                token_rewards=bootstrapped_rewards,
                values=None if values is None else values.values,
                mask=mask,
                scores=shaped.per_response,
                valid=shaped.valid,
                groups=_groups(shaped.rollouts),
                prompt_ids=shaped.rollouts.prompt_ids,
                lengths=shaped.rollouts.lengths,
                truths=rewards.truths,
                extras=rewards.extras,
                weights=self.component_weights,
                baselines=baselines,
            )
        )
        raw, trains_actor = estimate.advantages, self._trains_actor(shaped, values, estimate, mask)
        metrics |= {} if trains_actor is None else {metric_registry.POLICY_TRAINED.name: float(trains_actor)}
        carry = replace(
            shaped.carry,
            kl_coef=kl.next_coef,
            kl_first_coef=0.0 if self.penalty is None else self.penalty.coef,
            trained_seqs=shaped.carry.trained_seqs + float(mask.any(1).sum()),
            trained_tokens=shaped.carry.trained_tokens + float(mask.sum()),
            waited_steps=shaped.carry.waited_steps + float(trains_actor is False),
        )
        summary = shaped.metrics | metrics | estimate.metrics | _summary(raw, mask, carry) | kl.metrics
        return Advantages(
            advantages=whiten(raw, mask) if self.whitened else raw,
            returns=estimate.returns,
            token_rewards=token_rewards,
            mask=mask,
            carry_out=carry.as_dict(),
            kl_coef=None if kl.coef == kl.next_coef else kl.coef,
            summary=summary if self.reports_metrics else {},
            shaped=shaped.per_response,
            trains_actor=trains_actor,
        )

    def _trains_actor(
        self, shaped: ShapedRewards, values: Values | None, estimate: AdvantageEstimate, mask: Bool[Tensor, "B R"]
    ) -> bool | None:
        """Return whether the step trains the actor; None: there is no condition."""
        if self.critic_first is None:
            return None
        assert values is not None, "only a critic has an explained variance, and the step has none"
        assert estimate.returns is not None, "the critic learns returns, which the estimator did not compute"
        step, carry = shaped.rollouts.step, shaped.carry
        return self.critic_first.trains_actor(step, carry, values, estimate.returns, mask)

    def _training_mask(self, shaped: ShapedRewards) -> tuple[Bool[Tensor, "B R"], dict[str, float]]:
        """Return the mask of the tokens to train on, and the metric of filtered responses. Raises RewardError if no
        token is left."""
        if self.truncated != "filter":
            return shaped.mask, {}
        mask = shaped.mask & ~shaped.truncated[:, None]
        if not bool(mask.any()):
            raise RewardError(
                f"all {int(shaped.valid.sum())} scored responses that step {shaped.rollouts.step} generated are "
                "truncated, and `ppo.truncated` = `filter` excludes them: no response is left to train on",
                hint="ppoctl resume RUN --set ppo.truncated=terminal",
            )
        return mask, {metric_registry.ADVANTAGE_FILTERED_FRAC.name: shaped.mean(shaped.truncated.float())}


def _groups(rollouts: Rollouts) -> Int[Tensor, " B"]:
    """Return the index of the prompt of each row, by first occurrence. If several steps generate a response, two
    groups of a prompt that began in different steps stay apart: an epoch ended between them."""
    began = [0] * rollouts.num_seqs if rollouts.segment_stamps is None else map(step_of, rollouts.oldest_stamps)
    groups = [*zip(rollouts.prompt_ids, began, strict=True)]
    indices = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    return torch.tensor([indices[group] for group in groups])


def _summary(raw: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], carry: Carry) -> dict[str, float]:
    return {
        metric_registry.ADVANTAGE_RAW_MEAN.name: float(masked_mean(raw, mask)),
        metric_registry.ADVANTAGE_RAW_STD.name: float(masked_variance(raw, mask).sqrt()),
        metric_registry.ADVANTAGE_RAW_ABS_MAX.name: float(raw.where(mask, 0.0).abs().max()),
        metric_registry.TRAINED_SEQS.name: carry.trained_seqs,
        metric_registry.TRAINED_TOKENS.name: carry.trained_tokens,
    }


@dataclass(frozen=True)
class KlPenaltyResult:
    """KL divergence of the actor from the reference in one step, and the penalty for it."""

    in_reward: Float[Tensor, "B R"] | None
    """Amount subtracted from the reward of each token; None: the penalty is not in the reward."""
    coef: float
    """Coefficient of this step; 0 without a penalty."""
    next_coef: float
    metrics: dict[str, float]


def _penalised(
    penalty: KlPenalty | None, logprobs: Logprobs, mask: Bool[Tensor, "B R"], carry: Carry
) -> KlPenaltyResult:
    """Return the KL penalty of this step, in the reward or in the loss. Without a penalty (None), KL and coefficients
    are 0."""
    if penalty is None:
        return KlPenaltyResult(None, 0.0, 0.0, {})
    coef = next_coef = penalty.coef_at(carry)
    kl = penalty.before_update(logprobs, mask)
    if kl is None:
        # The actor update computes the KL and reports its metrics.
        return KlPenaltyResult(None, coef, coef, {})
    metrics = kl_metrics(kl, mask, coef)
    if penalty.target is not None:
        measured = penalty.target.measured(kl.nats, mask)
        metrics[metric_registry.KL_MEASURED.name] = measured
        next_coef = penalty.target.next_coef(coef, measured, num_seqs=len(mask))
    return KlPenaltyResult(coef * kl.nats if penalty.place == "reward" else None, coef, next_coef, metrics)
