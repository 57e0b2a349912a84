"""Rotary position embeddings (Su et al. 2021) in a configuration: the base period, and context scaling.

`convert.inv_freq` computes the frequencies from these parameters.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from ppoctl.models.shape_fields import UnsupportedValueError


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1: slow pairs of channels rotate `factor` times slower, fast pairs are not changed, and
    pairs between them are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    attention_factor: ClassVar[float] = 1.0


@dataclass(frozen=True)
class LinearScaling:
    """RoPE scaling by which all pairs of channels rotate `factor` times slower."""

    factor: float
    attention_factor: ClassVar[float] = 1.0


@dataclass(frozen=True)
class YarnScaling:
    """RoPE scaling of YaRN (arXiv:2309.00071): pairs with many rotations over the original context are not changed,
    pairs with few rotate `factor` times slower, and pairs between them are interpolated. In addition, attention
    scores grow with the factor."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    """Number of rotations over the original context from which on a pair of channels is not slowed."""
    beta_slow: float = 1.0
    """Number of rotations over the original context up to which a pair of channels is slowed by the full factor."""
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return self.growth(self.mscale) / self.growth(self.mscale_all_dim)

    def growth(self, mscale: float) -> float:
        """Return the growth of attention scores for the longer context (equation 22, with `mscale` = 1); 1 unless
        `factor` is above 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling
_KINDS: dict[str, type[Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings of a model: base period, and scaling for a longer context."""

    theta: float
    scaling: Scaling | None = None

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


def read_rope(parameters: Mapping[str, Any]) -> Rope:
    """Return the rotary position embeddings for `rope_parameters` of a configuration. Raises UnsupportedValueError
    for unsupported parameters."""
    rest = {key: value for key, value in parameters.items() if key != "type"}
    kind, theta = rest.pop("rope_type", "default"), rest.pop("rope_theta")
    if kind == "default" and not rest:
        return Rope(float(theta))
    # transformers and vLLM interpret a configuration with only one of YaRN's two mscale factors differently.
    is_whole = ("mscale" in rest) == ("mscale_all_dim" in rest)
    if kind in _KINDS and is_whole:
        known = {of.name: of for of in fields(_KINDS[kind])}
        if {name for name, of in known.items() if of.default is MISSING} <= set(rest) <= set(known):
            # config.json may write a float as an integer, such as `8` for `8.0`.
            numbers: dict[str, Any] = {
                name: int(value) if known[name].type is int else float(value) for name, value in rest.items()
            }
            return Rope(float(theta), _KINDS[kind](**numbers))
    supported = "; ".join(
        f"{kind} with {', '.join(of.name for of in fields(scaling))}" for kind, scaling in _KINDS.items()
    )
    raise UnsupportedValueError(f"supported: plain RoPE; {supported}")
