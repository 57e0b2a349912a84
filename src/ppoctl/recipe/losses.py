"""The recipe's tables of what actor and critic minimise."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from ppoctl.table import RESULTS, KindOr, NotNegative, Positive, Table

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]


class PolicyLossTable(Table):
    """What the kinds of policy loss share."""

    aggregation: Annotated[Aggregation, RESULTS] = "token_mean"
    """How the losses of tokens (the kind's own, entropy bonus, KL in the loss) become one number, over a whole
    minibatch. token_mean: the mean over all counted tokens (DAPO, arXiv:2503.14476; verl, NeMo-RL).
    sequence_mean_token_mean: the mean over sequences of each one's mean (GRPO, arXiv:2402.03300).
    sequence_mean_token_sum: the mean over sequences of each one's sum. fixed_length: of each one's sum divided by
    rollout.max_new_tokens (Dr. GRPO, arXiv:2503.20783). Sequences in which no token counts are in no mean."""
    entropy_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Coefficient of the entropy bonus: this x the mean token entropy is subtracted from the loss."""
    positive_nll_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Coefficient of the negative log-likelihood of good responses, added to the loss (VAPO, arXiv:2504.05118, there
    0.1): its mean over all tokens of the minibatch whose response earned a reward above 0."""


class ClippedLoss(PolicyLossTable):
    """Clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7): -min(A r, A clip(r, 1 - clip_low,
    1 + clip_high)) with r the token's new / old probability."""

    kind: Annotated[Literal["clip"], RESULTS] = "clip"
    """PPO's clipped surrogate: the gradient of a token whose ratio has moved far enough stops."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, RESULTS, Positive] = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float | None, RESULTS, Field(gt=1)] = None
    """Upper bound of the loss of a token with negative advantage A: -A x this (Ye et al. 2020); absent: none."""


class GspoLoss(PolicyLossTable):
    """Group sequence policy optimisation (arXiv:2507.18071): the clipped surrogate with one ratio for all tokens of a
    sequence, r = exp(mean over them of log new - log old probability)."""

    kind: Annotated[Literal["gspo"], RESULTS]
    """GSPO: the ratio is the geometric mean over the sequence."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, lt=1)] = 3e-4
    """The sequence's ratio is clipped below 1 - clip_low (the paper's number: a mean moves
    little)."""
    clip_high: Annotated[float, RESULTS, Positive] = 4e-4
    """The sequence's ratio is clipped above 1 + clip_high (the paper's number)."""
    ratio_gradient: Annotated[Literal["token", "sequence"], RESULTS] = "token"
    """Where the gradient goes. token: each token moves by its own advantage (GSPO-token, eq. 13-14; verl). sequence:
    through the sequence's ratio, so that all its tokens move by its mean advantage (eq. 5-7; NeMo-RL)."""
    aggregation: Annotated[Aggregation, RESULTS] = "sequence_mean_token_mean"
    """As of the other kinds; the default is the paper's, eq. 5."""


class CispoLoss(PolicyLossTable):
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4-5): -A log p, weighted by the clipped ratio as a constant."""

    kind: Annotated[Literal["cispo"], RESULTS]
    """CISPO: a token beyond the clip keeps its gradient, with a bounded weight."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, le=1)] = 1.0
    """The weight is at least 1 - clip_low; 1: no lower bound, as in MiniMax-M1."""
    clip_high: Annotated[float, RESULTS, Positive] = 0.2
    """The weight is at most 1 + clip_high (verl's number; the paper names none)."""


class ReinforceLoss(PolicyLossTable):
    """REINFORCE (Williams 1992): -A log p, without a ratio to the old policy."""

    kind: Annotated[Literal["reinforce"], RESULTS]
    """The plain policy gradient (NeMo-RL's disable_ppo_ratio)."""


PolicyLoss = Annotated[
    Annotated[ClippedLoss, Tag("clip")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[ReinforceLoss, Tag("reinforce")],
    Discriminator(KindOr("clip")),
]

OldLogprobs = Literal["trainer", "sampler", "current"]


class ValueLossTable(Table):
    """Squared error of the critic, optionally clipped around the old values."""

    clip: Annotated[float | None, RESULTS, Positive] = None
    """New values are clipped to old value +- clip, and the larger error counts; absent: off."""
    scale: Annotated[float, RESULTS, Positive] = 1.0
    """Factor of the value loss."""
    aggregation: Annotated[Aggregation, RESULTS] = "token_mean"
    """How the losses of tokens become one number. token_mean: their mean over the minibatch (PPO2, NeMo-RL, verl);
    sequence_mean_token_mean: the mean over sequences of each one's mean; sequence_mean_token_sum: the mean over
    sequences of each one's sum; fixed_length: those sums over `rollout.max_new_tokens`."""
