"""Rotary position embeddings: how fast each pair of channels turns (Su et al. 2021), and what stretches a context."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

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

    attention_factor: ClassVar[float] = 1.0

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002 - all scalings are called alike
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
    attention_factor: ClassVar[float] = 1.0

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002 - all scalings are called alike
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """Pairs that turn often over the original context turn as before, those that turn seldom `factor` times slower,
    those between something between; and queries times keys grow with the factor (YaRN, arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    """Turns over the original context from which pairs stay as they are."""
    beta_slow: float = 1.0
    """Turns up to which they are slowed by all of the factor."""
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def attention_factor(self) -> float:
        """Of cosines and sines."""
        return self.growth(self.mscale) / self.growth(self.mscale_all_dim)

    def growth(self, mscale: float) -> float:
        """By how much the longer context lets scores grow (equation 22, `mscale` = 1); 1 where the factor is not
        above 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scaled frequencies, in the order of transformers' operations."""
        half = len(frequencies)
        first, last = self._pair(self.beta_fast, half, theta), self._pair(self.beta_slow, half, theta)
        low, high = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
        ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low or 0.001)
        stays = 1 - ramp.clamp(0, 1)
        periods = theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
        return 1.0 / (self.factor * periods) * (1 - stays) + frequencies * stays

    def _pair(self, turns: float, half: int, theta: float) -> float:
        """The number of the pair that turns so often over the original context."""
        return half * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)


Scaling = LinearScaling | Llama3Scaling | YarnScaling
_KINDS: dict[str, type[Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


@dataclass(frozen=True)
class Rope:
    """Base period, and what a longer context was trained with."""

    theta: float
    scaling: Scaling | None = None

    def frequencies(self, head_dim: int) -> Float[Tensor, " half"]:
        """Radians per token of each pair of channels (i, i + head_dim / 2), float32."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        return plain if self.scaling is None else self.scaling(plain, self.theta)

    @property
    def attention_factor(self) -> float:
        """Of cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


def read_rope(parameters: Mapping[str, Any]) -> Rope:
    """From `rope_parameters` of a configuration. Raises UnsupportedValueError for what is not computed here."""
    rest = {key: value for key, value in parameters.items() if key != "type"}
    kind, theta = rest.pop("rope_type", "default"), rest.pop("rope_theta")
    if kind == "default" and not rest:
        return Rope(float(theta))
    # Of YaRN's two factors of growth one alone means one thing to transformers and another to vLLM.
    is_whole = ("mscale" in rest) == ("mscale_all_dim" in rest)
    if kind in _KINDS and is_whole:
        known = {of.name: of for of in fields(_KINDS[kind])}
        if {name for name, of in known.items() if of.default is MISSING} <= set(rest) <= set(known):
            # Files write whole numbers without a point.
            numbers: dict[str, Any] = {
                name: int(value) if known[name].type is int else float(value) for name, value in rest.items()
            }
            return Rope(float(theta), _KINDS[kind](**numbers))
    supported = "; ".join(f"{kind} with {', '.join(of.name for of in fields(made))}" for kind, made in _KINDS.items())
    raise UnsupportedValueError(f"supported are plain RoPE; {supported}")
