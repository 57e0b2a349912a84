"""KL penalty in the advantages stage: the penalty of each token, and the coefficient of the next step."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch.records import Carry, Logprobs
from ppoctl.stages.logprobs import KlPenalty, kl_metrics


@dataclass(frozen=True)
class KlPenaltyResult:
    """KL divergence of the actor from the reference in one step, and the penalty for it."""

    in_reward: Float[Tensor, "B R"] | None
    """Amount subtracted from the reward of each token; None: the penalty is not in the reward."""
    coef: float
    """Coefficient of this step; 0 without a penalty."""
    next_coef: float
    metrics: dict[str, float]


def penalised(
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
