"""45-correction: what is decided from the sampler's log-probs.

The sampler's log-probs are a measurement: a rollout that is finished after a crash repeats them only to rounding. So
what is decided from them is committed, and a resume decides the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch.records import Correction, Logprobs, Rollouts
from ppoctl.errors import MismatchError
from ppoctl.ppo.correction import CorrectionWeights, log_ratios, normalized
from ppoctl.ppo.masking import masked_mean
from ppoctl.stages.logprobs import require_finite

Weigh = Callable[[Float[Tensor, "B R"], Bool[Tensor, "B R"]], CorrectionWeights]
"""(log-ratios trainer - sampler, mask of the tokens that count) -> what they weigh."""
Keep = Callable[[Float[Tensor, "B R"], Bool[Tensor, "B R"]], Bool[Tensor, "B R"]]
"""(log-ratios trainer - sampler, mask) -> the tokens of the mask that are kept."""


_HINT = "ppoctl status RUN  # see `mismatch/`: mend the sampler, or resume with wider bounds by --set"


@dataclass(frozen=True)
class CorrectionStage:
    """Which tokens count in the actor's loss, and what they weigh. Each test of `keeps`, and `weigh`, see all
    tokens of the rollouts; only those that pass all tests count."""

    weigh: Weigh
    bounded: bool
    """Whether `weigh` has bounds."""
    keeps: Sequence[Keep]
    normalize: bool
    """Whether the weights are divided by their mean."""
    fingerprint: str
    name: str = "correction"

    def run(self, rollouts: Rollouts, logprobs: Logprobs) -> Correction:
        """Raises MismatchError when it leaves nothing to learn from."""
        assert logprobs.actor is not None, "a correction is on, and the trainer's log-probs were not taken"
        drawn = rollouts.mask
        require_finite(rollouts.sampler_logprobs, drawn, "a log-prob of the sampler")
        ratios = log_ratios(logprobs.actor, rollouts.sampler_logprobs, drawn)
        mask = drawn
        for keep in self.keeps:
            mask = mask & keep(ratios, drawn)
        weighed = self.weigh(ratios, drawn)
        weights, outside = weighed.weights.where(mask, 0.0), weighed.outside & mask
        if not bool((weights > 0).any()):
            raise MismatchError(
                f"the correction leaves `0` of the {int(drawn.sum())} tokens of step {rollouts.step}: sampler and "
                "trainer disagree on all of them",
                hint=_HINT,
            )
        weights = normalized(weights, mask) if self.normalize else weights
        figures = {metric_registry.CORRECTION_WEIGHT_MEAN.name: float(masked_mean(weights, mask))}
        if self.bounded:
            figures[metric_registry.CORRECTION_CAPPED_FRAC.name] = float(masked_mean(outside.float(), mask))
        if self.keeps:
            figures[metric_registry.CORRECTION_REJECTED_FRAC.name] = float(masked_mean((~mask).float(), drawn))
            dropped = drawn.any(1) & ~mask.any(1)
            figures[metric_registry.CORRECTION_DROPPED_SEQS.name] = float(dropped.sum())
        return Correction(weights=weights, mask=mask, summary=figures)


def counted_after(correction: Correction, mask: Bool[Tensor, "B R"]) -> Bool[Tensor, "B R"]:
    """The tokens of the mask, those with an advantage, that the correction keeps. Raises MismatchError when none of
    them weighs anything."""
    kept = mask & correction.mask
    if not bool((kept & (correction.weights > 0)).any()):
        raise MismatchError(
            f"the correction leaves `0` of the {int(mask.sum())} tokens that have an advantage",
            hint="ppoctl status RUN  # see `mismatch/`; for other bounds remove this step's folder 45-correction in "
            "RUN/steps, and resume with --set",
        )
    return kept
