"""Estimates of a KL divergence from two log-probs of each sampled token, and their gradients in a loss.

Source: Schulman's notes, http://joschu.net/blog/kl-approx.html. The exact sum over the vocabulary is computed by the
trainer; the coefficient is in `kl_coefficient`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "abs"]
KlGradient = Literal["estimator", "k2", "score_function", "importance"]

# exp(20) = 5e8: a larger log-ratio has no further meaning, and exp overflows from 88 on.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class KlEstimator:
    """Per-token estimates of KL(pi || other) in nats, for tokens sampled from pi, the policy of `logprobs`.

        d = other - logprobs          k1 = -d          k2 = d^2 / 2          k3 = exp(d) - 1 - d          abs = |d|

    k1 is unbiased with high variance. k2 is biased with low variance. k3 is unbiased, never negative, and has low
    variance. abs is a distance and does not estimate KL (as in verl).

    A clamp is active on a token if it changes its value: the input clamp if |d| > input_clamp, the output clamp if
    the estimate is outside +-output_clamp. None: no clamp. The notes have no clamps; NeMo-RL clamps at 20 and 10. k3
    always clamps d at 20 from above, which keeps exp finite. For very negative d, where `other` is far less likely,
    k3 is -d - 1 and needs no clamp.
    """

    kind: KlKind
    input_clamp: float | None = None
    output_clamp: float | None = None

    def estimates(
        self,
        logprobs: Float[Tensor, "B R"],
        other_logprobs: Float[Tensor, "B R"],
        mask: Bool[Tensor, "B R"] | None = None,
    ) -> Float[Tensor, "B R"]:
        """Return the estimates with the gradient of their formula; the gradient of a clamped token is 0.

        An unbiased value does not imply an unbiased gradient. The gradient with respect to logprobs, as a loss on
        tokens of pi (see `losses` for other gradients):

        - k1: 1, which is zero on average; use k1 in the reward, not in a loss.
        - k2: -d, on average the gradient of KL(pi || other).
        - k3: 1 - exp(d), on average the gradient of KL(other || pi).
        - abs: the sign of -d.

        With a mask, the result and the gradients are exactly 0 where masked out; without a mask every position is
        used.
        """
        d, _ = self._difference(logprobs, other_logprobs, mask)
        return self._bounded(_formula(d, self.kind))

    def losses(
        self,
        logprobs: Float[Tensor, "B R"],
        other_logprobs: Float[Tensor, "B R"],
        old_logprobs: Float[Tensor, "B R"],
        mask: Bool[Tensor, "B R"],
        *,
        gradient: KlGradient,
    ) -> Float[Tensor, "B R"]:
        """Return the estimates as a loss with the requested gradient; 0 where masked out.

        - estimator: the gradient of the estimate's own formula (see `estimates`).
        - k2: the value of the estimate with the gradient of k2 without clamps, logprobs - other, so that a clamped
          token is pulled back too (verl's "k1+", "k3+").
        - score_function: each estimate times w = exp(logprobs - stop(logprobs)), which is 1. This adds estimate x d
          logprobs. Over tokens of pi, the gradient is on average that of the estimate's expectation: KL(pi || other)
          for k1 and k3 (NeMo-RL). Without clamps, the gradient of k3 is token by token that of k2.
        - importance: each estimate times w = exp(logprobs - old). Over tokens of the policy that sampled them, the
          gradient is on average that of score_function, even after pi has moved away from that policy. The value is
          weighted too. The log-weight is clamped to +-20.

        The weight is inside the output clamp, which bounds w x estimate. A token that either clamp is active on
        contributes no gradient, not even through its weight: the input clamp makes w a constant there. With
        importance, the value of such a token still contains the weight, so it changes with logprobs while its
        gradient is 0. Multiplying after the clamps would give a clamped token the gradient w x clamp, away from the
        reference.
        """
        if gradient == "estimator":
            return self.estimates(logprobs, other_logprobs, mask)
        if gradient == "k2":
            pull = KlEstimator("k2").estimates(logprobs, other_logprobs, mask)
            return self.estimates(logprobs, other_logprobs, mask).detach() + (pull - pull.detach())
        before = logprobs if gradient == "score_function" else old_logprobs
        moved = torch.where(mask, logprobs - before.detach(), 0)
        weight = moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        d, is_clamped = self._difference(logprobs, other_logprobs, mask)
        weight = torch.where(is_clamped, weight.detach(), weight)
        return self._bounded(weight * _formula(d, self.kind))

    def held(
        self,
        logprobs: Float[Tensor, "B R"],
        other_logprobs: Float[Tensor, "B R"],
        mask: Bool[Tensor, "B R"],
    ) -> Bool[Tensor, "B R"]:
        """Return the unmasked tokens on which a clamp is active."""
        d, is_clamped = self._difference(logprobs, other_logprobs, mask)
        if self.output_clamp is not None:
            is_clamped = is_clamped | (_formula(d, self.kind).abs() > self.output_clamp)
        return is_clamped

    def _difference(
        self, logprobs: Tensor, other_logprobs: Tensor, mask: Tensor | None
    ) -> tuple[Float[Tensor, "B R"], Bool[Tensor, "B R"]]:
        """Return d after the input clamp, and the tokens on which the input clamp is active."""
        d = other_logprobs - logprobs
        if mask is not None:
            # Mask before the formulas: a `where` after the formulas would stop NaN in the value but not in the
            # gradient.
            d = torch.where(mask, d, 0)
        low = high = math.inf if self.input_clamp is None else self.input_clamp
        if self.kind == "k3":
            # There is no lower clamp: exp of a very negative number is finite, and a clamp would stop the gradient of
            # the most distant tokens.
            high = min(high, MAX_LOG_RATIO)
        return d.clamp(-low, high), (d < -low) | (d > high)

    def _bounded(self, estimate: Tensor) -> Float[Tensor, "B R"]:
        return estimate if self.output_clamp is None else estimate.clamp(-self.output_clamp, self.output_clamp)


def _formula(d: Float[Tensor, "B R"], kind: KlKind) -> Float[Tensor, "B R"]:
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "abs":
        return d.abs()
    # Use expm1, because exp(d) - 1 would lose all significant digits near d = 0, the usual case in training.
    return torch.expm1(d) - d
