"""Recipe tables that correct the difference between sampler and trainer log-probs: importance weights and rejection.

A ratio is always the trainer's probability / the sampler's probability, both under the weights of the rollout. Each
table builds its part of the correction stage; `PpoTable.build_correction` puts the parts together."""

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ppoctl.core.recipe_table import RESULTS, Positive, Table

if TYPE_CHECKING:
    from ppoctl.algorithms.stages.correction import Keep, Normalize, Weigh

NormalizeOver = Literal["kept_tokens", "tokens", "sequences"]
BelowOne = Field(gt=0, lt=1)
AboveOne = Field(gt=1)


class ImportanceTable(Table):
    """Base of the kinds of correction."""

    has_bounds: ClassVar[bool] = True
    """Whether the weights are bounded."""

    @abstractmethod
    def weigh(self) -> "Weigh":
        """Return the function that computes importance weights."""

    def keeps(self) -> "tuple[Keep, ...]":
        """Return the tests that a token must pass to stay in the actor's loss; empty: all tokens stay."""
        return ()

    def normalization(self) -> "Normalize | None":
        """Return the function that divides weights by their mean; None: they are not divided."""
        return None


class NoCorrection(ImportanceTable):
    """No correction: sampler and trainer log-probs are assumed to be equal."""

    has_bounds: ClassVar[bool] = False

    kind: Annotated[Literal["none"], RESULTS]
    """No importance weights."""

    def weigh(self) -> "Weigh":
        from ppoctl.algorithms.formulas.importance import unit_weights

        return unit_weights


class ImportanceWeights(ImportanceTable):
    """Keys that all kinds of importance weights share: the division of the weights by their mean over the step. m
    marks all tokens of the rollouts, k the tokens that are not rejected. Both include responses that are not trained
    on (without a score, or filtered by `ppo.truncated`), as in verl, so the mean weight in the loss may differ from
    1.

    Formula: w / mean; kept_tokens: mean = sum(k w) / sum(k); tokens: mean = sum(m w) / sum(m); sequences: mean =
        mean_i(sum_t(m w) / sum_t(m))
    Source: self-normalized importance sampling (Owen 2013, section 9.2)
    Default of: all systems (not divided); only verl has it, with tokens or sequences
    Figures: correction/weight_mean
    """

    normalize: Annotated[bool, RESULTS] = False
    """Whether the weights are divided by the mean that `normalize_over` selects."""
    normalize_over: Annotated[NormalizeOver, RESULTS] = "kept_tokens"
    """Weights whose mean divides all weights. kept_tokens: those of the tokens that are not rejected; tokens: those
    of all tokens, before rejection (verl with weights of tokens); sequences: the mean weight of each sequence, before
    rejection, so that short and long sequences count equally (verl with weights of sequences)."""

    def normalization(self) -> "Normalize | None":
        from ppoctl.algorithms.formulas.importance import normalized

        return partial(normalized, over=self.normalize_over) if self.normalize else None


class TruncatedImportance(ImportanceWeights):
    """Truncated importance sampling: the loss of each token is weighted by the ratio of its trainer and sampler
    probabilities, clipped to [min_ratio, max_ratio].

    Formula: w = clip(exp(trainer - sampler), min_ratio, max_ratio)
    Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
    Default of: verl (max_ratio 2); NeMo-RL has no default and uses 5 in its recipe
    Figures: correction/weight_mean, correction/capped_frac, mismatch/ess_frac
    """

    kind: Annotated[Literal["tis"], RESULTS]
    """Truncated importance sampling."""
    max_ratio: Annotated[float, RESULTS, AboveOne] = 2.0
    """Largest importance weight of a token (verl's default)."""
    min_ratio: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.0
    """Smallest importance weight of a token."""

    def weigh(self) -> "Weigh":
        from ppoctl.algorithms.formulas.importance import truncated_weights

        return partial(truncated_weights, min_ratio=self.min_ratio, max_ratio=self.max_ratio)


class TruncatedSequenceImportance(ImportanceWeights):
    """Truncated importance sampling of sequences: the loss of each token is weighted by the product of the trainer /
    sampler probability ratios in its sequence, clipped to [min_ratio, max_ratio].

    Formula: w = clip(exp(sum over the sequence of trainer - sampler), min_ratio, max_ratio)
    Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training; verl's rollout
    correction
    Default of: verl (max_ratio 2)
    Figures: correction/weight_mean, correction/capped_frac
    """

    kind: Annotated[Literal["tis_sequence"], RESULTS]
    """Truncated importance sampling with one weight per sequence."""
    max_ratio: Annotated[float, RESULTS, AboveOne] = 2.0
    """Largest importance weight of a sequence (verl's default)."""
    min_ratio: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.0
    """Smallest importance weight of a sequence."""

    def weigh(self) -> "Weigh":
        from ppoctl.algorithms.formulas.importance import truncated_sequence_weights

        return partial(truncated_sequence_weights, min_ratio=self.min_ratio, max_ratio=self.max_ratio)


class IcePop(ImportanceWeights):
    """IcePop: the loss of each token is weighted by the ratio of its trainer and sampler probabilities if this ratio
    is between min_ratio and max_ratio, and by 0 otherwise. Tokens with weight 0 still count in the divisor of the
    loss, in the entropy bonus and in the KL penalty.

    Formula: w = r if min_ratio <= r <= max_ratio, else 0; r = exp(trainer - sampler)
    Source: Zhao et al. 2025, Small Leak Can Sink a Great Ship (IcePop)
    Default of: the authors, a preset of verl, OpenRLHF (0.5 and 5); NeMo-RL has no default
    Figures: correction/weight_mean, correction/capped_frac
    """

    kind: Annotated[Literal["icepop"], RESULTS]
    """Importance weights that are 0 outside the bounds."""
    min_ratio: Annotated[float, RESULTS, BelowOne] = 0.5
    """Smallest ratio with a nonzero weight (default: the value of the paper and of verl)."""
    max_ratio: Annotated[float, RESULTS, AboveOne] = 5.0
    """Largest ratio with a nonzero weight (default: the value of the paper and of verl)."""

    def weigh(self) -> "Weigh":
        from ppoctl.algorithms.formulas.importance import inside_weights

        return partial(inside_weights, min_ratio=self.min_ratio, max_ratio=self.max_ratio)


class SequenceIcePop(ImportanceWeights):
    """IcePop of sequences: the loss of each token is weighted by the product of the trainer / sampler probability
    ratios in its sequence if this product is between min_ratio and max_ratio, and by 0 otherwise. Tokens with weight
    0 still count in the divisor of the loss, in the entropy bonus and in the KL penalty.

    Formula: w = s if min_ratio <= s <= max_ratio, else 0; s = exp(sum over the sequence of trainer - sampler)
    Source: verl's rollout correction (`rollout_is = "sequence"` with two bounds)
    Default of: no system; verl has no default bounds for it
    Figures: correction/weight_mean, correction/capped_frac
    """

    kind: Annotated[Literal["icepop_sequence"], RESULTS]
    """One importance weight per sequence, which is 0 outside the bounds."""
    min_ratio: Annotated[float, RESULTS, BelowOne] = 0.5
    """Smallest product of ratios with a nonzero weight (default: that of `icepop`)."""
    max_ratio: Annotated[float, RESULTS, AboveOne] = 5.0
    """Largest product of ratios with a nonzero weight (default: that of `icepop`)."""

    def weigh(self) -> "Weigh":
        from ppoctl.algorithms.formulas.importance import inside_sequence_weights

        return partial(inside_sequence_weights, min_ratio=self.min_ratio, max_ratio=self.max_ratio)


class SequenceMask(ImportanceWeights):
    """Mask of sequences by the geometric mean of the trainer / sampler probability ratios of their tokens. A sequence
    whose mean is outside [min_ratio, max_ratio] is masked out of every term of the actor's loss. The tokens of the
    other sequences are weighted by their ratio, and the loss divides by the number of remaining tokens.

    Formula: kept if min_ratio <= exp(mean over the sequence of trainer - sampler) <= max_ratio; w = exp(trainer -
        sampler)
    Source: NeMo-RL's seq-mask-tis, which divides by all tokens
    Default of: no system; verl's preset for a geometric mean has 0.999 and 1.001
    Figures: correction/weight_mean, correction/rejected_frac, correction/dropped_seqs
    """

    has_bounds: ClassVar[bool] = False

    kind: Annotated[Literal["sequence_mask"], RESULTS]
    """Importance weights for sequences within the bounds; other sequences are masked out."""
    min_ratio: Annotated[float, RESULTS, BelowOne]
    """Smallest geometric mean of a sequence in the loss (verl's preset: 0.999)."""
    max_ratio: Annotated[float, RESULTS, AboveOne]
    """Largest geometric mean of a sequence in the loss (verl's preset: 1.001)."""

    def weigh(self) -> "Weigh":
        from ppoctl.algorithms.formulas.importance import plain_weights

        return plain_weights

    def keeps(self) -> "tuple[Keep, ...]":
        from ppoctl.algorithms.formulas.importance import kept_by_ratio

        low, high = self.min_ratio, self.max_ratio
        return (partial(kept_by_ratio, level="sequence_mean", min_ratio=low, max_ratio=high),)


CorrectionTable = Annotated[
    NoCorrection | TruncatedImportance | TruncatedSequenceImportance | IcePop | SequenceIcePop | SequenceMask,
    Field(discriminator="kind"),
]


class NoRejection(Table):
    """No rejection: every sampled token stays in the loss."""

    kind: Annotated[Literal["none"], RESULTS]
    """No rejection."""

    def keeps(self) -> "tuple[Keep, ...]":
        """Return no test: every token stays."""
        return ()


class RatioRejection(Table):
    """Rejection by a statistic of the ratio r = trainer / sampler probability. Tokens or sequences outside the bounds
    are masked out of every term of the actor's loss. Advantages and the critic still use all tokens, so the reward of
    a rejected token is not lost. The bounds apply to r; verl's bounds for k1 apply to 1 / r.

    Formula: kept if min_ratio <= r <= max_ratio (k1), (log r)^2 / 2 <= max (k2), r - 1 - log r <= max (k3)
    Source: verl's rollout correction (rejection sampling)
    Default of: no system; verl's presets have 0.5 and 2 for k1 at sequence_sum, 0.01 for k3
    Figures: correction/rejected_frac, correction/dropped_seqs, mismatch/gap_k3
    """

    kind: Annotated[Literal["ratio"], RESULTS]
    """Rejection by the ratio of trainer and sampler probabilities."""
    statistic: Annotated[Literal["k1", "k2", "k3"], RESULTS] = "k1"
    """Statistic that is bounded. k1: the ratio r, bounded by min_ratio and max_ratio; k2: (log r)^2 / 2, in nats,
    bounded by max; k3: r - 1 - log r, in nats, bounded by max."""
    level: Annotated[Literal["token", "sequence_sum", "sequence_mean", "sequence_max"], RESULTS]
    """Unit of rejection. token: each token is rejected by its own statistic. The other levels reject complete
    sequences. sequence_sum: by the sum of the statistic over the tokens (k1: the product of the ratios).
    sequence_mean: by the mean of the statistic (k1: the geometric mean of the ratios). sequence_max: by the statistic
    of the worst token."""
    min_ratio: Annotated[float | None, RESULTS, BelowOne] = None
    """Smallest ratio that is kept (k1); absent: no bound."""
    max_ratio: Annotated[float | None, RESULTS, AboveOne] = None
    """Largest ratio that is kept (k1); absent: no bound."""
    max: Annotated[float | None, RESULTS, Positive] = None
    """Largest statistic that is kept, in nats (k2, k3)."""

    def keeps(self) -> "tuple[Keep, ...]":
        """Return the test of the statistic."""
        from ppoctl.algorithms.formulas.importance import kept_by_divergence, kept_by_ratio

        if self.statistic == "k1":
            return (partial(kept_by_ratio, level=self.level, min_ratio=self.min_ratio, max_ratio=self.max_ratio),)
        assert self.max is not None, "a rule of the recipe requires `max`"
        return (partial(kept_by_divergence, statistic=self.statistic, level=self.level, max_nats=self.max),)


Rejection = Annotated[NoRejection | RatioRejection, Field(discriminator="kind")]
