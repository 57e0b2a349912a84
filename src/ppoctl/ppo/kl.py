"""Estimates of a KL divergence from two log-probs of each sampled token (Schulman's notes), and their gradients in a
loss.

http://joschu.net/blog/kl-approx.html. The exact sum over the vocabulary is not here; the coefficient is in
`kl_coefficient`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "abs"]
KlGradient = Literal["estimator", "k2", "score_function", "importance"]

# exp(20) = 5e8: above it a log-ratio says only "far away", and exp would overflow from 88 on.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class KlEstimator:
    """Per-token estimates of KL(pi || other) in nats, for tokens sampled from pi, the policy of `logprobs`.

        d = other - logprobs          k1 = -d          k2 = d^2 / 2          k3 = exp(d) - 1 - d          abs = |d|

    k1 is unbiased and noisy, k2 biased with little noise, k3 unbiased, never negative, with little noise; abs is not
    an estimate of KL but a distance (verl has it).

    A clamp holds a token when it changes its number: the input clamp where |d| > input_clamp, the output clamp where
    the estimate is outside +-output_clamp. None: no clamp. NeMo-RL clamps at 20 and 10. k3 always holds d at 20 from
    above, which keeps exp finite; below, where `other` is far less likely, k3 is -d - 1 and needs no clamp.
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
        """The estimates, with the gradient of their formula: that of a token that a clamp holds is 0.

        The value and the gradient are two questions. Gradient with respect to logprobs, as a loss on tokens of pi
        (see `losses` for others):
        k1: 1, zero on average, so use k1 in the reward, not in a loss.
        k2: -d, on average the gradient of KL(pi || other).
        k3: 1 - exp(d), on average the gradient of KL(other || pi).
        abs: the sign of -d.

        With a mask the result and the gradients under it are exactly 0; without one every position counts.
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
        """The estimates as a loss with the gradient that the penalty is to have; 0 under the mask.

        estimator: the gradient of the estimate's own formula (see `estimates`).
        k2: the estimate's value and the gradient of k2 without clamps, logprobs - other, so that a token that a clamp
        holds is pulled back too (verl's "k1+", "k3+").
        score_function: each estimate times w = exp(logprobs - stop(logprobs)), which is 1. Adds estimate x
        d logprobs: on average over tokens of pi the gradient of what the estimate averages to, so of KL(pi || other)
        for k1 and k3 (NeMo-RL). Without clamps that of k3 is token by token the gradient of k2.
        importance: each estimate times w = exp(logprobs - old). That of score_function on average over tokens of the
        policy that sampled them, also when pi has moved away from it; the value is weighted too. The log-weight is
        held within +-20.

        The weight is inside the output clamp, which bounds w x estimate. A token that either clamp holds contributes
        no gradient, through its weight neither: the input clamp makes w a constant there. With importance its value
        still has the weight, w x estimate; so the value of such a token moves with logprobs while its gradient is 0.
        Multiplying after the clamps would give a held token the gradient w x clamp, away from the reference.
        """
        if gradient == "estimator":
            return self.estimates(logprobs, other_logprobs, mask)
        if gradient == "k2":
            pull = KlEstimator("k2").estimates(logprobs, other_logprobs, mask)
            return self.estimates(logprobs, other_logprobs, mask).detach() + (pull - pull.detach())
        before = logprobs if gradient == "score_function" else old_logprobs
        moved = torch.where(mask, logprobs - before.detach(), 0)
        weight = moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        d, held = self._difference(logprobs, other_logprobs, mask)
        weight = torch.where(held, weight.detach(), weight)
        return self._bounded(weight * _formula(d, self.kind))

    def held(
        self,
        logprobs: Float[Tensor, "B R"],
        other_logprobs: Float[Tensor, "B R"],
        mask: Bool[Tensor, "B R"],
    ) -> Bool[Tensor, "B R"]:
        """The tokens of the mask whose estimate a clamp holds."""
        d, held = self._difference(logprobs, other_logprobs, mask)
        if self.output_clamp is not None:
            held = held | (_formula(d, self.kind).abs() > self.output_clamp)
        return held

    def _difference(
        self, logprobs: Tensor, other_logprobs: Tensor, mask: Tensor | None
    ) -> tuple[Float[Tensor, "B R"], Bool[Tensor, "B R"]]:
        """d within the input clamp, and the tokens that are held there."""
        d = other_logprobs - logprobs
        if mask is not None:
            # Before the formulas: a where behind them would stop NaN in the value but not in the gradient.
            d = torch.where(mask, d, 0)
        low = high = math.inf if self.input_clamp is None else self.input_clamp
        if self.kind == "k3":
            # Not from below: there exp vanishes, and a clamp would stop the gradient of the farthest tokens.
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
    # expm1: near d = 0, where training lives, exp(d) - 1 would lose all its digits.
    return torch.expm1(d) - d
