"""The recipe's tables of what actor and critic minimise."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from ppoctl.recipe_table import RESULTS, KindOr, NotNegative, Positive, Table

AggregationName = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]


class PolicyLossTable(Table):
    """What the kinds of policy loss share."""

    aggregation: Annotated[AggregationName, RESULTS] = "token_mean"
    """How the losses of tokens (the kind's own, the entropy bonus, KL in the loss) become one number.
    token_mean: their mean, so that long responses weigh more. sequence_mean_token_mean: the mean over sequences of
    each one's mean. sequence_mean_token_sum: the mean over sequences of each one's sum. fixed_length: of each one's
    sum divided by rollout.max_new_tokens. Tokens and sequences are counted over the whole minibatch; sequences in
    which no token counts are in no mean. verl's sequence modes divide by all sequences of the minibatch, so that a
    rejected or masked sequence weakens the loss there.
    Formula: token_mean: sum(m l) / sum(m); sequence_mean_token_mean: mean_i(sum_t(m l) / sum_t(m));
    sequence_mean_token_sum: mean_i(sum_t(m l)); fixed_length: mean_i(sum_t(m l) / rollout.max_new_tokens)
    Source: DAPO (arXiv:2503.14476) for token_mean, GRPO (arXiv:2402.03300) for sequence_mean_token_mean, Dr. GRPO
    (arXiv:2503.20783) for fixed_length.
    Default of: verl, NeMo-RL, OpenRLHF; TRL and trlX have the mean over tokens of each microbatch."""
    entropy_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Coefficient of the entropy bonus: this x the mean token entropy is subtracted from the loss.
    Formula: l - entropy_coef H, H = -sum_v p_v log p_v at the temperature of sampling
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9.
    Default of: verl (0.001 before 0.3), OpenRLHF; NeMo-RL, TRL and trlX have no such term.
    Figures: policy/entropy_mean"""
    positive_nll_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Coefficient of the negative log-likelihood of good responses, which is added to the loss: the mean over all
    tokens of the minibatch whose response earned a reward above 0.
    Formula: positive_nll_coef x sum(-log p) / (number of those tokens)
    Source: VAPO (arXiv:2504.05118), there 0.1.
    Default of: NeMo-RL."""


class ClippedLoss(PolicyLossTable):
    """Clipped surrogate: the gradient of a token stops once its ratio has moved far enough.
    Formula: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = new / old probability of the token
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7.
    Default of: all peers (the kind).
    Figures: policy/clip_frac, policy/ratio_max"""

    kind: Annotated[Literal["clip"], RESULTS] = "clip"
    """PPO's clipped surrogate."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped below 1 - clip_low.
    Default of: verl, NeMo-RL, OpenRLHF, TRL, trlX.
    Figures: policy/clip_frac_low"""
    clip_high: Annotated[float, RESULTS, Positive] = 0.2
    """The probability ratio is clipped above 1 + clip_high. Above clip_low, unlikely tokens may gain more.
    Source: DAPO (arXiv:2503.14476), there 0.28.
    Default of: verl, OpenRLHF, TRL, trlX; NeMo-RL has 0.28.
    Figures: policy/clip_frac_high"""
    dual_clip: Annotated[float | None, RESULTS, Field(gt=1)] = None
    """Upper bound of the loss of a token with negative advantage A: -A x this; absent: none.
    Source: Ye et al. 2020 (arXiv:1912.09729).
    Default of: OpenRLHF; verl has 3, NeMo-RL 10.
    Figures: policy/dual_clip_frac"""


class GspoLoss(PolicyLossTable):
    """Group sequence policy optimisation: the clipped surrogate with one ratio for all tokens of a sequence.
    Formula: max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean over the sequence of log r), the mean
    held within +-20 (verl: at most 10, NeMo-RL: not held)
    Source: GSPO (arXiv:2507.18071), eq. 5-7 and 13-14.
    Default of: nobody (the kind)."""

    kind: Annotated[Literal["gspo"], RESULTS]
    """GSPO: the ratio is the geometric mean over the sequence."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, lt=1)] = 3e-4
    """The sequence's ratio is clipped below 1 - clip_low; being a mean, it moves little.
    Default of: the paper, 5.1.
    Figures: policy/clip_frac_low"""
    clip_high: Annotated[float, RESULTS, Positive] = 4e-4
    """The sequence's ratio is clipped above 1 + clip_high.
    Default of: the paper, 5.1.
    Figures: policy/clip_frac_high"""
    ratio_gradient: Annotated[Literal["token", "sequence"], RESULTS] = "token"
    """Where the gradient goes. token: each token moves by its own advantage (eq. 13-14). sequence: through the
    sequence's ratio, so that all its tokens move by its mean advantage (eq. 5-7). They differ where the tokens of a
    response have different advantages, as a critic's have.
    Default of: verl; sequence is NeMo-RL's."""
    aggregation: Annotated[AggregationName, RESULTS] = "sequence_mean_token_mean"
    """How the losses of tokens become one number, with the same choice as for the other kinds.
    Default of: the paper, eq. 5."""


class CispoLoss(PolicyLossTable):
    """CISPO: the log-prob of a token, weighted by its clipped ratio as a constant. A token beyond the clip keeps its
    gradient.
    Formula: -A sg(clip(r, 1 - clip_low, 1 + clip_high)) log p
    Source: MiniMax-M1 (arXiv:2506.13585), eq. 4-5.
    Default of: nobody (the kind)."""

    kind: Annotated[Literal["cispo"], RESULTS]
    """CISPO: a token's weight is bounded, its gradient does not stop."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, le=1)] = 1.0
    """The weight is at least 1 - clip_low; 1: no lower bound.
    Default of: MiniMax-M1.
    Figures: policy/clip_frac_low"""
    clip_high: Annotated[float, RESULTS, Positive] = 0.2
    """The weight is at most 1 + clip_high.
    Default of: verl; the paper names no number.
    Figures: policy/clip_frac_high"""


class ReinforceLoss(PolicyLossTable):
    """REINFORCE: the plain policy gradient, without a ratio to the old policy.
    Formula: -A log p
    Source: Williams 1992.
    Default of: nobody (the kind)."""

    kind: Annotated[Literal["reinforce"], RESULTS]
    """The plain policy gradient (NeMo-RL's disable_ppo_ratio)."""


AnyPolicyLossTable = Annotated[
    Annotated[ClippedLoss, Tag("clip")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[ReinforceLoss, Tag("reinforce")],
    Discriminator(KindOr("clip")),
]

OldLogprobs = Literal["trainer", "sampler", "current"]


class ValueLossTable(Table):
    """Squared error of the critic, optionally clipped around the old values.

    Formula: e1 = (V - G)^2; e2 = (clip(V, V_old - clip, V_old + clip) - G)^2; l = scale max(e1, e2) / 2, or
    scale e1 / 2 without clip
    Source: PPO2 of OpenAI's baselines
    Default of: scale: verl, OpenRLHF, trlX (NeMo-RL's base recipe has 0.4, TRL 0.1). No clip is nobody's: verl and
    OpenRLHF have 0.5, NeMo-RL's base recipe, TRL and trlX 0.2
    Figures: value/loss, value/explained_variance, value/explained_variance_last_epoch, value/clip_frac,
    value/value_error
    """

    clip: Annotated[float | None, RESULTS, Positive] = None
    """New values are clipped to old value +- clip, and the larger error counts; absent: off."""
    scale: Annotated[float, RESULTS, Positive] = 1.0
    """Factor of the value loss."""
    aggregation: Annotated[AggregationName, RESULTS] = "token_mean"
    """How the losses of tokens become one number, over a whole minibatch. token_mean: the mean over all counted
    tokens. sequence_mean_token_mean: the mean over sequences of each one's mean. sequence_mean_token_sum: the mean
    over sequences of each one's sum. fixed_length: of each one's sum divided by rollout.max_new_tokens. Sequences in
    which no token counts are in no mean.
    Default of: PPO2, NeMo-RL, verl (token_mean)."""
