"""The recipe's tables of the KL penalty."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ppoctl.recipe_table import RESULTS, AtLeastOne, Positive, Table


class AdaptivePerToken(Table):
    """Coefficient that follows a target of KL per token. A step uses the coefficient that the one before left, and
    saved states keep it. It moves in critic-only steps too.

    Formula: e = clip(KL / target_per_token - 1, -0.2, 0.2); coef of the next step = coef (1 + e n / horizon_seqs),
        n = sequences of the step; KL = mean over sequences of the mean over their tokens
    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2
    Default of: verl (its unit and its horizon); OpenRLHF weighs sequences by their length; both lose it on a restart
    Figures: kl/coef, kl/measured
    """

    target_per_token: Annotated[float, RESULTS, Positive]
    """KL per token in nats that is aimed at; held against the mean over sequences of their mean over tokens."""
    horizon_seqs: Annotated[int, RESULTS, AtLeastOne] = 10000
    """Sequences over which the coefficient changes by e (default: verl's and trlX's)."""


class AdaptivePerSequence(Table):
    """Coefficient that follows a target of KL per whole response. A step uses the coefficient that the one before
    left, and saved states keep it. It moves in critic-only steps too.

    Formula: e = clip(KL / target_per_sequence - 1, -0.2, 0.2); coef of the next step = coef (1 + e n / horizon_seqs),
        n = sequences of the step; KL = mean over sequences of the sum over their tokens
    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2
    Default of: trlX (its unit and its horizon); the coefficient is lost on a restart
    Figures: kl/coef, kl/measured
    """

    target_per_sequence: Annotated[float, RESULTS, Positive]
    """KL of a whole response in nats that is aimed at; held against the mean over sequences of their sum over
    tokens."""
    horizon_seqs: Annotated[int, RESULTS, AtLeastOne] = 10000
    """Sequences over which the coefficient changes by e (default: verl's and trlX's)."""


def _target(value: Any) -> str:
    keys = value if isinstance(value, dict) else type(value).model_fields
    return "sequence" if "target_per_sequence" in keys else "token"


Adaptive = Annotated[
    Annotated[AdaptivePerToken, Tag("token")] | Annotated[AdaptivePerSequence, Tag("sequence")],
    Discriminator(_target),
]

Estimator = Literal["k1", "k2", "k3", "abs", "full"]


class NoKl(Table):
    """No penalty; no reference model is loaded."""

    place: Annotated[Literal["none"], RESULTS]
    """No penalty."""


class KlInReward(Table):
    """KL penalty in the reward: each token's reward loses coef x its KL estimate, of log-probs at rollout time.

    Formula: reward of a token -= coef estimate(d), d = actor's - reference's log-prob
    Source: Ziegler et al. 2019 (arXiv:1909.08593); estimators: Schulman, http://joschu.net/blog/kl-approx.html
    Default of: verl and trlX (k1, without clamps); NeMo-RL has k3 with clamps of 20 and 10
    Figures: kl/reference_mean, kl/penalty_mean, kl/coef, kl/clamped_frac
    """

    place: Annotated[Literal["reward"], RESULTS]
    """The penalty is subtracted from the reward of each token."""
    estimator: Annotated[Estimator, RESULTS] = "k1"
    """Estimate of KL(actor, reference) from one token, with d = actor's - reference's log-prob. k1: d; k2: d^2 / 2;
    k3: exp(-d) - 1 + d (all Schulman's); abs: |d|, a distance and no KL (verl's). full: no estimate but the sum over
    the vocabulary, of the filtered actor from the whole reference."""
    input_clamp: Annotated[float | None, RESULTS, Positive] = None
    """The difference of log-probs is held within +- this before the estimate; absent: off (NeMo-RL, and verl for k3:
    20). k3 always holds the reference's log-prob within 20 nats above the actor's, so that its exp does not
    overflow."""
    output_clamp: Annotated[float | None, RESULTS, Positive] = None
    """The estimate of a token is held within +- this; absent: off (NeMo-RL, and verl for k3: 10)."""
    coef: Annotated[float, RESULTS, Positive]
    """Coefficient of the penalty; with `adaptive` that of the first step with a penalty, and of the first after a
    change of this key."""
    adaptive: Adaptive | None = None
    """Target that the coefficient follows; absent: it is fixed."""


class KlInLoss(Table):
    """KL penalty in the loss: coef x mean KL is added to the policy loss, of log-probs at the update.

    Formula: loss += coef mean(estimate(d)), d = actor's - reference's log-prob
    Source: Shao et al. 2024 (arXiv:2402.03300); estimators: Schulman, http://joschu.net/blog/kl-approx.html
    Default of: verl (k3 with the gradient of its formula, and clamps of 20 and 10); NeMo-RL has the clamps, and
        score_function
    Figures: kl/reference_mean, kl/coef, kl/clamped_frac, policy/kl_loss
    """

    place: Annotated[Literal["loss"], RESULTS]
    """The penalty is added to the policy loss."""
    estimator: Annotated[Estimator, RESULTS] = "k3"
    """Estimate of KL(actor, reference) from one token, with d = actor's - reference's log-prob. k1: d, which needs
    another `gradient` than its own (that averages to 0); k2: d^2 / 2; k3: exp(-d) - 1 + d (all Schulman's); abs: |d|,
    a distance and no KL (verl's). full: no estimate but the sum over the vocabulary, of the filtered actor from the
    whole reference, which a forward of the reference reads in every update; its gradient is exact on these tokens'
    states, and its figures are of the step's first minibatch, unless a coefficient adapts to it."""
    input_clamp: Annotated[float | None, RESULTS, Positive] = None
    """The difference of log-probs is held within +- this before the estimate; absent: off (NeMo-RL, and verl for k3:
    20). k3 always holds the reference's log-prob within 20 nats above the actor's, so that its exp does not
    overflow."""
    output_clamp: Annotated[float | None, RESULTS, Positive] = None
    """The estimate of a token is held within +- this; absent: off (NeMo-RL, and verl for k3: 10)."""
    gradient: Annotated[Literal["estimator", "k2", "score_function", "importance"], RESULTS] = "estimator"
    """Gradient of the penalty in the loss. estimator: that of the estimate's formula (verl, TRL). k2: value of the
    estimate, gradient of k2 (verl's `+`), on average that of KL(actor, reference). score_function: the estimate times
    exp(logp - stop(logp)), on average that of what the estimate averages to (NeMo-RL). importance: the estimate times
    new / old probability, which stays right when the actor has moved within the step. The weight is inside the output
    clamp. A token that a clamp holds contributes no gradient, through its weight neither, except with k2, which pulls
    it back. With importance such a token still has its weight in its value: the input clamp makes the weight a
    constant, and the output clamp bounds weight x estimate, so that a weight below 1 can free a token from it.
    Formula: penalty of a token = clip(w f(clip(d, -input_clamp, input_clamp)), -output_clamp, output_clamp);
    d = logp - ref; f = d (k1), d^2 / 2 (k2), exp(-d) - 1 + d (k3), abs(d) (abs);
    w = exp(logp - stop(logp)) = 1 (score_function), exp(logp - old) (importance), 1 otherwise
    Table: gradient / estimator / slope by logp: no clamp holds / input clamp holds / output clamp holds;
    estimator / k1 / 1 / 0 / 0;
    estimator / k2 / d / 0 / 0;
    estimator / k3 / 1 - exp(-d) / 0 / 0;
    estimator / abs / sign(d) / 0 / 0;
    k2 / any / d / d / d;
    score_function / k1 / 1 + d / 0 / 0;
    score_function / k2 / d + d^2/2 / 0 / 0;
    score_function / k3 / d / 0 / 0;
    score_function / abs / sign(d) + abs(d) / 0 / 0;
    importance / k1 / w (1 + d) / 0 / 0;
    importance / k2 / w (d + d^2/2) / 0 / 0;
    importance / k3 / w d / 0 / 0;
    importance / abs / w (sign(d) + abs(d)) / 0 / 0
    Source: Schulman, http://joschu.net/blog/kl-approx.html; weights and clamps as in NeMo-RL since June 2026
    Default of: verl, TRL (estimator); NeMo-RL has score_function
    Figures: kl/clamped_frac, policy/kl_loss"""
    coef: Annotated[float, RESULTS, Positive]
    """Coefficient of the penalty; with `adaptive` that of the first step with a penalty, and of the first after a
    change of this key."""
    adaptive: Adaptive | None = None
    """Target that the coefficient follows; absent: it is fixed."""


Kl = Annotated[NoKl | KlInReward | KlInLoss, Field(discriminator="place")]
