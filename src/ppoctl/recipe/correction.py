"""The recipe's tables of the gap between the sampler's and the trainer's log-probs: what tokens weigh, and which are
rejected. A ratio is always the trainer's probability / the sampler's, both at rollout time."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.recipe_table import RESULTS, Positive, Table

BelowOne = Field(gt=0, lt=1)
AboveOne = Field(gt=1)


class NoCorrection(Table):
    """No correction: the sampler's log-probs are trusted to be the trainer's."""

    kind: Annotated[Literal["none"], RESULTS]
    """No weights."""


class TruncatedImportance(Table):
    """Truncated importance sampling: each token's loss is weighted by its trainer / sampler probability, held between
    min_ratio and max_ratio.

    Formula: w = clip(exp(trainer - sampler), min_ratio, max_ratio)
    Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
    Default of: verl (max_ratio 2); NeMo-RL has no default, and 5 in its recipe
    Figures: correction/weight_mean, correction/capped_frac, mismatch/ess_frac
    """

    kind: Annotated[Literal["tis"], RESULTS]
    """Truncated importance sampling."""
    max_ratio: Annotated[float, RESULTS, AboveOne] = 2.0
    """Largest importance weight of a token (verl's default)."""
    min_ratio: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.0
    """Smallest importance weight of a token."""
    normalize: Annotated[bool, RESULTS] = False
    """Whether the weights are divided by their mean over the sampled tokens that no rejection takes out, so that they
    average 1. verl's batch normalisation takes that mean before rejection, over all tokens."""


class TruncatedSequenceImportance(Table):
    """Truncated importance sampling of sequences: each token's loss is weighted by the product of its sequence's
    trainer / sampler probabilities, held between min_ratio and max_ratio.

    Formula: w = clip(exp(sum over the sequence of trainer - sampler), min_ratio, max_ratio)
    Source: Yao et al. 2025, as above; verl's rollout correction
    Default of: verl (max_ratio 2)
    Figures: correction/weight_mean, correction/capped_frac
    """

    kind: Annotated[Literal["tis_sequence"], RESULTS]
    """Truncated importance sampling with one weight per sequence."""
    max_ratio: Annotated[float, RESULTS, AboveOne] = 2.0
    """Largest importance weight of a sequence (verl's default)."""
    min_ratio: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.0
    """Smallest importance weight of a sequence."""
    normalize: Annotated[bool, RESULTS] = False
    """Whether the weights are divided by their mean over the sampled tokens that no rejection takes out, so that they
    average 1. verl's takes that mean before rejection, and over sequences, each once
    however long."""


class IcePop(Table):
    """IcePop: each token's loss is weighted by its trainer / sampler probability where that lies between min_ratio
    and max_ratio, and by 0 elsewhere. Such tokens count in what the loss divides by, in the entropy bonus and in the
    KL penalty.

    Formula: w = r where min_ratio <= r <= max_ratio, else 0; r = exp(trainer - sampler)
    Source: Zhao et al. 2025, Small Leak Can Sink a Great Ship (IcePop)
    Default of: the authors, a preset of verl, OpenRLHF (0.5 and 5); NeMo-RL has no default. verl also has it by
        sequence, which is not here
    Figures: correction/weight_mean, correction/capped_frac
    """

    kind: Annotated[Literal["icepop"], RESULTS]
    """Importance weights that are 0 outside the bounds."""
    min_ratio: Annotated[float, RESULTS, BelowOne] = 0.5
    """Smallest ratio of a token with a weight (the paper's and verl's)."""
    max_ratio: Annotated[float, RESULTS, AboveOne] = 5.0
    """Largest ratio of a token with a weight (the paper's and verl's)."""
    normalize: Annotated[bool, RESULTS] = False
    """Whether the weights are divided by their mean over the sampled tokens that no rejection takes out, so that they
    average 1. verl's batch normalisation takes that mean before rejection, over all tokens."""


class SequenceMask(Table):
    """Sequences kept by the geometric mean of their trainer / sampler probabilities: one outside min_ratio and
    max_ratio counts in no term of the actor's loss, and the tokens of the others weigh their ratio. The loss divides
    by what is left.

    Formula: kept where min_ratio <= exp(mean over the sequence of trainer - sampler) <= max_ratio; w = exp(trainer -
        sampler)
    Source: NeMo-RL's seq-mask-tis, which divides by all tokens
    Default of: nobody; verl's preset for a geometric mean has 0.999 and 1.001
    Figures: correction/weight_mean, correction/rejected_frac, correction/dropped_seqs
    """

    kind: Annotated[Literal["sequence_mask"], RESULTS]
    """Importance weights for sequences within the bounds, and no others."""
    min_ratio: Annotated[float, RESULTS, BelowOne]
    """Smallest geometric mean of a sequence that counts (verl's preset: 0.999)."""
    max_ratio: Annotated[float, RESULTS, AboveOne]
    """Largest geometric mean of a sequence that counts (verl's preset: 1.001)."""
    normalize: Annotated[bool, RESULTS] = False
    """Whether the weights are divided by their mean over what is left of the step, so that they average 1."""


CorrectionTable = Annotated[
    NoCorrection | TruncatedImportance | TruncatedSequenceImportance | IcePop | SequenceMask,
    Field(discriminator="kind"),
]


class NoRejection(Table):
    """No rejection: every drawn token counts."""

    kind: Annotated[Literal["none"], RESULTS]
    """Nothing is rejected."""


class RatioRejection(Table):
    """Rejection on a statistic of the ratio r = trainer / sampler probability: what lies outside the bounds counts in
    no term of the actor's loss. Advantages and the critic see all tokens, so that no reward is lost with a rejected
    token. Bounds are of r itself; verl's of k1 are of 1 / r.

    Formula: kept where min_ratio <= r <= max_ratio (k1), (log r)^2 / 2 <= max (k2), r - 1 - log r <= max (k3)
    Source: verl's rollout correction (rejection sampling)
    Default of: nobody; verl's presets have 0.5 and 2 for k1 at sequence_sum, 0.01 for k3
    Figures: correction/rejected_frac, correction/dropped_seqs, mismatch/gap_k3
    """

    kind: Annotated[Literal["ratio"], RESULTS]
    """Rejection by the ratio of trainer and sampler."""
    statistic: Annotated[Literal["k1", "k2", "k3"], RESULTS] = "k1"
    """What is bounded. k1: the ratio r, by min_ratio and max_ratio; k2: (log r)^2 / 2, and k3: r - 1 - log r, both in
    nats, by max."""
    level: Annotated[Literal["token", "sequence_sum", "sequence_mean", "sequence_max"], RESULTS]
    """Whose statistic decides over whom. token: a token's own over itself; the others over the whole sequence: the
    sum over its tokens (of k1: the product of ratios), their mean (of k1: the geometric mean), or the worst token."""
    min_ratio: Annotated[float | None, RESULTS, BelowOne] = None
    """Smallest ratio that counts (k1); absent: no bound."""
    max_ratio: Annotated[float | None, RESULTS, AboveOne] = None
    """Largest ratio that counts (k1); absent: no bound."""
    max: Annotated[float | None, RESULTS, Positive] = None
    """Largest statistic that counts, in nats (k2, k3)."""


Rejection = Annotated[NoRejection | RatioRejection, Field(discriminator="kind")]
