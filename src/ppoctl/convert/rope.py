"""Rotary position embeddings: how fast each pair of channels turns (Su et al. 2021), and what stretches a context."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.convert.fields import UnsupportedValueError


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow pairs turn `factor` times slower, fast ones as before, those between something between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Scaled frequencies, in the order of transformers' operations."""
        original, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        slow = torch.where(wavelengths > original / low, frequencies / self.factor, frequencies)
        smooth = (original / wavelengths - low) / (high - low)
        between = (1 - smooth) * slow / self.factor + smooth * slow
        is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
        return torch.where(is_between, between, slow)


@dataclass(frozen=True)
class LinearScaling:
    """All pairs turn `factor` times slower."""

    factor: float

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


Scaling = LinearScaling | Llama3Scaling
_KINDS: dict[str, type[Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling}


@dataclass(frozen=True)
class Rope:
    """Base period, and what a longer context was trained with."""

    theta: float
    scaling: Scaling | None = None

    def frequencies(self, head_dim: int) -> Float[Tensor, " half"]:
        """Radians per token of each pair of channels (i, i + head_dim / 2), float32."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        return plain if self.scaling is None else self.scaling(plain)


def read_rope(parameters: Mapping[str, Any]) -> Rope:
    """From `rope_parameters` of a configuration. Raises UnsupportedValueError for what is not computed here."""
    rest = {key: value for key, value in parameters.items() if key != "type"}
    kind, theta = rest.pop("rope_type", "default"), rest.pop("rope_theta")
    if kind == "default" and not rest:
        return Rope(float(theta))
    if kind in _KINDS and set(rest) == set(_KINDS[kind].__dataclass_fields__):
        return Rope(float(theta), _KINDS[kind](**rest))
    known = "; ".join(f"{kind} with {', '.join(made.__dataclass_fields__)}" for kind, made in _KINDS.items())
    raise UnsupportedValueError(f"supported are plain RoPE; {known}")
