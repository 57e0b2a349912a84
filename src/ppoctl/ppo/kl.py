"""Estimates of a KL divergence from two log-probs of each sampled token (Schulman's notes), and how they pull as a
loss.

http://joschu.net/blog/kl-approx.html. The exact sum over the vocabulary is not here; the coefficient is in
`kl_coefficient`.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "abs"]
KlGradient = Literal["estimator", "k2", "score_function", "importance"]

# exp(20) = 5e8: above it a log-ratio says only "far away", and exp would overflow from 88 on.
MAX_LOG_RATIO = 20.0


def kl_estimate(
    logprobs: Float[Tensor, "B R"],
    other_logprobs: Float[Tensor, "B R"],
    *,
    kind: KlKind,
    mask: Bool[Tensor, "B R"] | None = None,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Float[Tensor, "B R"]:
    """Per-token estimates of KL(pi || other) in nats, for tokens sampled from pi, the policy of `logprobs`.

        d = other - logprobs          k1 = -d          k2 = d^2 / 2          k3 = exp(d) - 1 - d          abs = |d|

    k1 is unbiased and noisy, k2 biased with little noise, k3 unbiased, never negative, with little noise; abs is no
    estimate of KL but a distance (verl has it). k3 takes d up to 20, which keeps exp finite; below, where pi says a
    token and other never would, it is -d - 1.

    input_clamp holds d, and output_clamp the estimate, within +- so much; None: they are as they are. NeMo-RL clamps
    at 20 and 10. A token beyond a clamp has the clamp's value and no gradient.

    The value and the gradient are two questions. Gradient with respect to logprobs, as a loss on tokens of pi (see
    `kl_losses` for others):
    k1: 1, zero on average: it pulls nowhere, so use k1 in the reward, not in a loss.
    k2: -d, on average the gradient of KL(pi || other).
    k3: 1 - exp(d), on average the gradient of KL(other || pi), and 0 for tokens with d above 20, that pi would hardly
    have said.
    abs: the sign of -d.

    With a mask the result and the gradients under it are exactly 0; without one every position counts.
    """
    d = other_logprobs - logprobs
    if mask is not None:
        # Before the formulas: a where behind them would stop NaN in the value but not in the gradient.
        d = torch.where(mask, d, 0)
    if input_clamp is not None:
        d = d.clamp(-input_clamp, input_clamp)
    estimate = _formula(d, kind)
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def kl_losses(
    estimates: Float[Tensor, "B R"],
    logprobs: Float[Tensor, "B R"],
    other_logprobs: Float[Tensor, "B R"],
    old_logprobs: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    gradient: KlGradient,
) -> Float[Tensor, "B R"]:
    """The estimates of KL(pi || other) of `logprobs`, with the gradient that a loss is to have; 0 under the mask.

    estimator: the gradient of the estimate's own formula (see `kl_estimate`).
    k2: the estimate's value and the gradient of k2 without clamps, logprobs - other, so that a token beyond a clamp
    is pulled back too (verl's "k1+", "k3+").
    score_function: each estimate times exp(logprobs - stop(logprobs)), which is 1. Adds estimate x d logprobs: on
    average over tokens of pi the gradient of what the estimate averages to, so of KL(pi || other) for k1 and k3
    (NeMo-RL). Without clamps that of k3 is token by token the gradient of k2.
    importance: each estimate times exp(logprobs - old). That of score_function on average over tokens of the policy
    that drew them, also when pi has left it; the value is weighted too. The log-weight is held within +-20.
    """
    if gradient == "estimator":
        return estimates
    if gradient == "k2":
        pull = kl_estimate(logprobs, other_logprobs, kind="k2", mask=mask)
        return estimates.detach() + (pull - pull.detach())
    before = logprobs if gradient == "score_function" else old_logprobs
    moved = torch.where(mask, logprobs - before.detach(), 0)
    return estimates * moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _formula(d: Float[Tensor, "B R"], kind: KlKind) -> Float[Tensor, "B R"]:
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "abs":
        return d.abs()
    # Not from below: there exp vanishes by itself, and a clamp would let go of the tokens farthest from other.
    d = d.clamp(max=MAX_LOG_RATIO)
    # expm1: near d = 0, where training lives, exp(d) - 1 would lose all its digits.
    return torch.expm1(d) - d
