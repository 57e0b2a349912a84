"""Estimates of a KL divergence from two log-probs of each sampled token (Schulman's notes).

http://joschu.net/blog/kl-approx.html. The exact sum over the vocabulary is not here, nor is the coefficient.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KlKind = Literal["k1", "k2", "k3"]

# exp(20) = 5e8: above it a log-ratio says only "far away", and exp would overflow from 88 on.
MAX_LOG_RATIO = 20.0


def kl_estimate(
    logprobs: Float[Tensor, "B R"],
    other_logprobs: Float[Tensor, "B R"],
    *,
    kind: KlKind,
    mask: Bool[Tensor, "B R"] | None = None,
) -> Float[Tensor, "B R"]:
    """Per-token estimates of KL(pi || other) in nats, for tokens sampled from pi, the policy of `logprobs`.

        d = other - logprobs          k1 = -d          k2 = d^2 / 2          k3 = exp(d) - 1 - d

    k1 is unbiased and noisy, k2 biased with little noise, k3 unbiased, never negative, with little noise. k3 takes d
    up to 20, which keeps exp finite; below, where pi says a token and other never would, it is -d - 1.

    The value and the gradient are two questions. Gradient with respect to logprobs, as a loss on tokens of pi:
    k1: 1, zero on average: it pulls nowhere, so use k1 in the reward, not in a loss.
    k2: -d, on average the gradient of KL(pi || other).
    k3: 1 - exp(d), on average the gradient of KL(other || pi), and 0 for tokens with d above 20, that pi would hardly
    have said.

    With a mask the result and the gradients under it are exactly 0; without one every position counts.
    """
    d = other_logprobs - logprobs
    if mask is not None:
        # Before the formulas: a where behind them would stop NaN in the value but not in the gradient.
        d = torch.where(mask, d, 0)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    # Not from below: there exp vanishes by itself, and a clamp would let go of the tokens farthest from other.
    d = d.clamp(max=MAX_LOG_RATIO)
    # expm1: near d = 0, where training lives, exp(d) - 1 would lose all its digits.
    return torch.expm1(d) - d
