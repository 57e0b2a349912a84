"""RMS norms under Megatron-Core's constructor.

Where a norm sees only its rank's share of the positions, its gradient is marked to be summed over the tensor ranks
(Megatron-Core's own wrapper refuses that case).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RmsNorm(torch.nn.RMSNorm):
    """torch's: x / rms(x) * weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class OffsetRmsNorm(RmsNorm):
    """Gemma's: x / rms(x) * (1 + weight), in float32. The weight stays as it is on disk, so that none of it is
    rounded away."""

    def forward(self, x: Float[Tensor, "*positions hidden"]) -> Float[Tensor, "*positions hidden"]:
        """In the dtype of `x`."""
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)
