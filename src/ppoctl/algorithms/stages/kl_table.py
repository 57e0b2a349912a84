"""Recipe tables of the KL penalty. Each table builds its penalty."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ppoctl.core.recipe_table import RESULTS, AtLeastOne, Positive, Table

if TYPE_CHECKING:
    from ppoctl.algorithms.formulas.kl import KlGradient
    from ppoctl.algorithms.formulas.kl_coefficient import KlTarget
    from ppoctl.algorithms.stages.logprobs import KlPenalty


class AdaptivePerToken(Table):
    """Coefficient that adapts to a target of KL per token. A step uses the coefficient that the previous step
    computed, and the coefficient is part of saved states. It adapts in critic-only steps too.

    Formula: e = clip(KL / target_per_token - 1, -0.2, 0.2); coef of the next step = coef (1 + e n / horizon_seqs),
        n = sequences of the step; KL = mean over sequences of the mean over their tokens
    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2
    Default of: verl (the unit and the horizon); OpenRLHF weights sequences by their length; both systems lose the
    coefficient on a restart
    Figures: kl/coef, kl/measured
    """

    target_per_token: Annotated[float, RESULTS, Positive]
    """Target KL per token, in nats; compared with the mean over sequences of the mean KL of their tokens."""
    horizon_seqs: Annotated[int, RESULTS, AtLeastOne] = 10000
    """Number of sequences over which the coefficient changes by the fraction e of the formula (default: the value of
    verl and trlX)."""

    def build(self) -> "KlTarget":
        """Return the target of the coefficient."""
        from ppoctl.algorithms.formulas.kl_coefficient import KlTarget

        return KlTarget(self.target_per_token, "token", self.horizon_seqs)


class AdaptivePerSequence(Table):
    """Coefficient that adapts to a target of KL per complete response. A step uses the coefficient that the previous
    step computed, and the coefficient is part of saved states. It adapts in critic-only steps too.

    Formula: e = clip(KL / target_per_sequence - 1, -0.2, 0.2); coef of the next step = coef (1 + e n / horizon_seqs),
        n = sequences of the step; KL = mean over sequences of the sum over their tokens
    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2
    Default of: trlX (the unit and the horizon), which loses the coefficient on a restart
    Figures: kl/coef, kl/measured
    """

    target_per_sequence: Annotated[float, RESULTS, Positive]
    """Target KL of a complete response, in nats; compared with the mean over sequences of the summed KL of their
    tokens."""
    horizon_seqs: Annotated[int, RESULTS, AtLeastOne] = 10000
    """Number of sequences over which the coefficient changes by the fraction e of the formula (default: the value of
    verl and trlX)."""

    def build(self) -> "KlTarget":
        """Return the target of the coefficient."""
        from ppoctl.algorithms.formulas.kl_coefficient import KlTarget

        return KlTarget(self.target_per_sequence, "sequence", self.horizon_seqs)


def _target(value: Any) -> str:
    keys = value if isinstance(value, dict) else type(value).model_fields
    return "sequence" if "target_per_sequence" in keys else "token"


Adaptive = Annotated[
    Annotated[AdaptivePerToken, Tag("token")] | Annotated[AdaptivePerSequence, Tag("sequence")],
    Discriminator(_target),
]

KlEstimatorName = Literal["k1", "k2", "k3", "abs", "full"]


class NoKl(Table):
    """No penalty; no reference model is loaded."""

    place: Annotated[Literal["none"], RESULTS]
    """No penalty."""

    def build(self) -> None:
        """Return None: there is no penalty."""


class KlInReward(Table):
    """KL penalty in the reward: coef x the KL estimate of a token is subtracted from the reward of the token. The
    estimate uses log-probs from before the update.

    Formula: reward of a token -= coef estimate(d), d = actor's - reference's log-prob
    Source: Ziegler et al. 2019 (arXiv:1909.08593); estimators: Schulman, http://joschu.net/blog/kl-approx.html
    Default of: verl and trlX (k1, without clamps); NeMo-RL uses k3 with clamps of 20 and 10
    Figures: kl/reference_mean, kl/penalty_mean, kl/coef, kl/clamped_frac
    """

    place: Annotated[Literal["reward"], RESULTS]
    """The penalty is subtracted from the reward of each token."""
    estimator: Annotated[KlEstimatorName, RESULTS] = "k1"
    """Estimate of KL(actor, reference) from one token, with d = actor's - reference's log-prob. k1: d; k2: d^2 / 2;
    k3: exp(-d) - 1 + d (all Schulman's); abs: |d|, which is a distance but not a KL (verl's). full: not an estimate
    but the exact KL(actor, reference) over the vocabulary; the actor's distribution is filtered, the reference's
    distribution is not."""
    input_clamp: Annotated[float | None, RESULTS, Positive] = None
    """Bound of the log-prob difference, which is clamped to +- this value before the estimate is computed; absent: no
    clamp (NeMo-RL, and verl for k3, use 20). k3 always clamps the reference's log-prob to at most 20 nats above the
    actor's, so that exp does not overflow."""
    output_clamp: Annotated[float | None, RESULTS, Positive] = None
    """Bound of the estimate of a token, which is clamped to +- this value; absent: no clamp (NeMo-RL, and verl for
    k3, use 10)."""
    coef: Annotated[float, RESULTS, Positive]
    """Coefficient of the penalty. With `adaptive`: the coefficient of the first step with a penalty, and of the first
    step after a change of this key."""
    adaptive: Adaptive | None = None
    """Target that the coefficient adapts to; absent: the coefficient is fixed."""

    def build(self) -> "KlPenalty":
        """Return the penalty."""
        return _penalty(self, "estimator")


class KlInLoss(Table):
    """KL penalty in the loss: coef x the mean KL estimate is added to the policy loss. The estimate uses log-probs
    that the update computes.

    Formula: loss += coef mean(estimate(d)), d = actor's - reference's log-prob
    Source: Shao et al. 2024 (arXiv:2402.03300); estimators: Schulman, http://joschu.net/blog/kl-approx.html
    Default of: verl (k3 with gradient estimator, and clamps of 20 and 10); NeMo-RL uses the same clamps with
        score_function
    Figures: kl/reference_mean, kl/coef, kl/clamped_frac, policy/kl_loss
    """

    place: Annotated[Literal["loss"], RESULTS]
    """The penalty is added to the policy loss."""
    estimator: Annotated[KlEstimatorName, RESULTS] = "k3"
    """Estimate of KL(actor, reference) from one token, with d = actor's - reference's log-prob. k1: d, whose gradient
    is 0 on average, so that k1 requires a `gradient` other than "estimator"; k2: d^2 / 2; k3: exp(-d) - 1 + d (all
    Schulman's); abs: |d|, which is a distance but not a KL (verl's). full: not an estimate but the exact KL(actor,
    reference) over the vocabulary; the actor's distribution is filtered, the reference's distribution is not. With
    full, every update runs a forward pass of the reference. The gradient is exact for the states of the sampled
    tokens. The KL metrics are measured only on the first minibatch of the step, unless the coefficient is
    adaptive."""
    input_clamp: Annotated[float | None, RESULTS, Positive] = None
    """Bound of the log-prob difference, which is clamped to +- this value before the estimate is computed; absent: no
    clamp (NeMo-RL, and verl for k3, use 20). k3 always clamps the reference's log-prob to at most 20 nats above the
    actor's, so that exp does not overflow."""
    output_clamp: Annotated[float | None, RESULTS, Positive] = None
    """Bound of the estimate of a token, which is clamped to +- this value; absent: no clamp (NeMo-RL, and verl for
    k3, use 10)."""
    gradient: Annotated[Literal["estimator", "k2", "score_function", "importance"], RESULTS] = "estimator"
    """Gradient of the penalty in the loss. estimator: the gradient of the estimate's formula (verl, TRL). k2: the
    value of the estimate with the gradient of k2 (verl's `+`), which is on average the gradient of KL(actor,
    reference). score_function: the estimate times the weight exp(logp - stop(logp)); its gradient is on average the
    gradient of the expected estimate (NeMo-RL). importance: the estimate times the weight new / old probability; it
    remains correct after the first updates of a step have changed the actor. The output clamp applies to weight x
    estimate. A clamped token contributes no gradient, not even through its weight. The only exception is k2, whose
    gradient is the same with and without a clamp. With importance, the weight still scales the value of a clamped
    token: under the input clamp, the weight is a constant; under the output clamp, a weight below 1 can bring weight
    x estimate back inside the clamp.
    Formula: penalty of a token = clip(w f(clip(d, -input_clamp, input_clamp)), -output_clamp, output_clamp);
    d = logp - ref; f = d (k1), d^2 / 2 (k2), exp(-d) - 1 + d (k3), abs(d) (abs);
    w = exp(logp - stop(logp)) = 1 (score_function), exp(logp - old) (importance), 1 otherwise
    Table: gradient / estimator / slope by logp: not clamped / clamped by input_clamp / clamped by output_clamp;
    estimator / k1 / 1 / 0 / 0; estimator / k2 / d / 0 / 0; estimator / k3 / 1 - exp(-d) / 0 / 0; estimator / abs /
    sign(d) / 0 / 0; k2 / any / d / d / d; score_function / k1 / 1 + d / 0 / 0; score_function / k2 / d + d^2/2 / 0 /
    0; score_function / k3 / d / 0 / 0; score_function / abs / sign(d) + abs(d) / 0 / 0; importance / k1 / w (1 + d) /
    0 / 0; importance / k2 / w (d + d^2/2) / 0 / 0; importance / k3 / w d / 0 / 0; importance / abs / w (sign(d) +
    abs(d)) / 0 / 0
    Source: Schulman, http://joschu.net/blog/kl-approx.html; weights and clamps as in NeMo-RL since June 2026
    Default of: verl, TRL (estimator); NeMo-RL uses score_function
    Figures: kl/clamped_frac, policy/kl_loss"""
    coef: Annotated[float, RESULTS, Positive]
    """Coefficient of the penalty. With `adaptive`: the coefficient of the first step with a penalty, and of the first
    step after a change of this key."""
    adaptive: Adaptive | None = None
    """Target that the coefficient adapts to; absent: the coefficient is fixed."""

    def build(self) -> "KlPenalty":
        """Return the penalty."""
        return _penalty(self, self.gradient)


Kl = Annotated[NoKl | KlInReward | KlInLoss, Field(discriminator="place")]


def _penalty(table: KlInReward | KlInLoss, gradient: "KlGradient") -> "KlPenalty":
    from ppoctl.algorithms.stages.logprobs import KlPenalty

    return KlPenalty(
        place=table.place,
        estimator=table.estimator,
        coef=table.coef,
        input_clamp=table.input_clamp,
        output_clamp=table.output_clamp,
        gradient=gradient,
        target=None if table.adaptive is None else table.adaptive.build(),
    )
