"""45-correction: what is decided from the sampler's log-probs.

The sampler's log-probs are a measurement: a rollout that is finished after a crash repeats them only to rounding. So
what is decided from them is committed, and a resume decides the same.
"""

from dataclasses import dataclass

from ppoctl import metrics
from ppoctl.batch.records import Correction, Logprobs, Rollouts
from ppoctl.ppo.masking import masked_mean
from ppoctl.ppo.policy_loss import truncated_importance_weights


@dataclass(frozen=True)
class CorrectionStage:
    """Truncated importance sampling: each token weighs min(trainer / sampler probability, max_ratio)."""

    max_ratio: float
    fingerprint: str
    name: str = "correction"

    def run(self, rollouts: Rollouts, logprobs: Logprobs) -> Correction:
        assert logprobs.actor is not None, "a correction is on, and the trainer's log-probs were not taken"
        weights = truncated_importance_weights(
            logprobs.actor, rollouts.sampler_logprobs, rollouts.mask, max_ratio=self.max_ratio
        )
        capped = (weights == self.max_ratio).float()
        return Correction(
            weights=weights,
            mask=rollouts.mask,
            summary={
                metrics.CORRECTION_WEIGHT_MEAN.name: float(masked_mean(weights, rollouts.mask)),
                metrics.CORRECTION_CAPPED_FRAC.name: float(masked_mean(capped, rollouts.mask)),
            },
        )
