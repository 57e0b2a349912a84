"""Inverse frequencies of RoPE, computed in transformers' order of operations, so that they are bitwise equal to those
of transformers."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling


def inv_freq(rope: Rope, head_dim: int) -> Float[Tensor, " half"]:
    """Return the radians per token of each pair of channels (i, i + head_dim / 2), float32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(plain, rope.scaling, rope.theta)


def _llama3(plain: Tensor, by: Llama3Scaling) -> Tensor:
    original, low, high = by.original_max_position_embeddings, by.low_freq_factor, by.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slow = torch.where(wavelengths > original / low, plain / by.factor, plain)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * slow / by.factor + smooth * slow
    is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_between, between, slow)


def _yarn(plain: Tensor, by: YarnScaling, theta: float) -> Tensor:
    half = len(plain)

    def pair(rotations: float) -> float:
        """Return the index of the pair of channels with this number of rotations over the original context."""
        return half * math.log(by.original_max_position_embeddings / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = max(math.floor(pair(by.beta_fast)), 0), min(math.ceil(pair(by.beta_slow)), 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low or 0.001)
    unscaled = 1 - ramp.clamp(0, 1)
    periods = theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    return 1.0 / (by.factor * periods) * (1 - unscaled) + plain * unscaled
