"""The part of the advantages stage that is about KL: the penalty of each token, and the next step's coefficient."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch.records import Carry, Logprobs
from ppoctl.stages.logprobs import KlPenalty, kl_metrics


@dataclass(frozen=True)
class KlPenaltyResult:
    """A step's KL from the reference."""

    in_reward: Float[Tensor, "B R"] | None
    """What the reward of each token loses; None: nothing."""
    coef: float
    """The coefficient of this step; 0 without a penalty."""
    next_coef: float
    metrics: dict[str, float]


def penalised(
    penalty: KlPenalty | None, logprobs: Logprobs, mask: Bool[Tensor, "B R"], carry: Carry
) -> KlPenaltyResult:
    """What this step's log-probs make of a penalty, in the reward or in the loss; None: there is none."""
    if penalty is None:
        return KlPenaltyResult(None, 0.0, 0.0, {})
    coef = following = penalty.coef_at(carry)
    kl = penalty.before_update(logprobs, mask)
    if kl is None:
        # The update says it, and reports the figures.
        return KlPenaltyResult(None, coef, coef, {})
    figures = kl_metrics(kl, mask, coef)
    if penalty.target is not None:
        measured = penalty.target.measured(kl.nats, mask)
        figures[metric_registry.KL_MEASURED.name] = measured
        following = penalty.target.next_coef(coef, measured, num_seqs=len(mask))
    return KlPenaltyResult(coef * kl.nats if penalty.place == "reward" else None, coef, following, figures)
