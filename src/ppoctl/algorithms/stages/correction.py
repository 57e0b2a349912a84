"""45-correction: importance weights and rejection of tokens, computed from sampler and trainer log-probs.

Sampler log-probs are measured: a rollout that is finished after a crash repeats them only up to rounding. Weights and
mask are therefore committed, so that a resume uses the same weights and mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.formulas.importance import CorrectionWeights, log_ratios
from ppoctl.algorithms.formulas.masking import masked_mean
from ppoctl.algorithms.stages.logprobs import require_finite
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import Correction, Logprobs, Rollouts
from ppoctl.core.errors import MismatchError

Weigh = Callable[[Float[Tensor, "B R"], Bool[Tensor, "B R"]], CorrectionWeights]
"""(log-ratios trainer - sampler, mask) -> importance weights."""
Keep = Callable[[Float[Tensor, "B R"], Bool[Tensor, "B R"]], Bool[Tensor, "B R"]]
"""(log-ratios trainer - sampler, mask) -> the tokens of the mask that are kept."""
Normalize = Callable[[Float[Tensor, "B R"], Bool[Tensor, "B R"], Bool[Tensor, "B R"]], Float[Tensor, "B R"]]
"""(weights, mask, tokens of the mask that are kept) -> divided weights, 0 where a token is not kept."""


_HINT = "ppoctl status RUN  # see `mismatch/`: fix the sampler, or resume with wider bounds by --set"


@dataclass(frozen=True)
class CorrectionStage:
    """Importance weights of tokens, and the tokens that are in the actor's loss.

    `weigh` and each test of `keeps` receive all tokens of the rollouts; only tokens that pass all tests are in the
    loss.
    """

    weigh: Weigh
    bounded: bool
    """Whether `weigh` has bounds."""
    keeps: Sequence[Keep]
    normalize: Normalize | None
    """Division of the weights by their mean; None: they are not divided."""
    fingerprint: str
    name: str = "correction"

    def run(self, rollouts: Rollouts, logprobs: Logprobs) -> Correction:
        """Return the weights and the mask. Raises MismatchError if no token is left to train on."""
        assert logprobs.actor is not None, "the correction requires the trainer's log-probs, which were not computed"
        sampled = rollouts.mask
        require_finite(rollouts.sampler_logprobs, sampled, "a log-prob of the sampler")
        ratios = log_ratios(logprobs.actor, rollouts.sampler_logprobs, sampled)
        mask = sampled
        for keep in self.keeps:
            mask = mask & keep(ratios, sampled)
        weighted = self.weigh(ratios, sampled)
        weights, outside = weighted.weights.where(mask, 0.0), weighted.outside & mask
        if not bool((weights > 0).any()):
            raise MismatchError(
                f"the correction leaves `0` of the {int(sampled.sum())} tokens that step {rollouts.step} generated: "
                "sampler and trainer disagree on all of them",
                hint=_HINT,
            )
        if self.normalize is not None:
            weights = self.normalize(weighted.weights, sampled, mask)
        metrics = {metric_registry.CORRECTION_WEIGHT_MEAN.name: float(masked_mean(weights, mask))}
        if self.bounded:
            metrics[metric_registry.CORRECTION_CAPPED_FRAC.name] = float(masked_mean(outside.float(), mask))
        if self.keeps:
            metrics[metric_registry.CORRECTION_REJECTED_FRAC.name] = float(masked_mean((~mask).float(), sampled))
            dropped = sampled.any(1) & ~mask.any(1)
            metrics[metric_registry.CORRECTION_DROPPED_SEQS.name] = float(dropped.sum())
        return Correction(weights=weights, mask=mask, summary=metrics)


def mask_after(correction: Correction, mask: Bool[Tensor, "B R"]) -> Bool[Tensor, "B R"]:
    """Return the tokens of `mask` (the tokens with an advantage) that the correction keeps. Raises MismatchError if
    all of these tokens have weight 0."""
    kept = mask & correction.mask
    if not bool((kept & (correction.weights > 0)).any()):
        raise MismatchError(
            f"the correction leaves `0` of the {int(mask.sum())} tokens that have an advantage",
            hint="ppoctl status RUN  # see `mismatch/`; to change the bounds, remove this step's folder "
            "45-correction in RUN/steps, and resume with --set",
        )
    return kept
