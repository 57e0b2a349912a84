"""Small modules under Megatron-Core's constructors: norms, products with a norm behind them, the critic's head.

Where a norm sees only its rank's share of the positions, its gradient is marked to be summed over the tensor ranks
(Megatron-Core's own wrapper refuses that case).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMS norm: x / rms(x) * weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class OffsetRmsNorm(RmsNorm):
    """Gemma's RMS norm: x / rms(x) * (1 + weight), in float32. The weight stays as it is on disk, so that none of it
    is rounded away."""

    def forward(self, x: Float[Tensor, "*positions hidden"]) -> Float[Tensor, "*positions hidden"]:
        """The normalised positions, in the dtype of `x`."""
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class RowLinear(RowParallelLinear):
    """A product whose weight tensor ranks split by columns: Megatron-Core's, told its tensor-parallel group where
    this version forgets to (and warns that it should)."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **settings: Any) -> Tensor:
        return super()._forward_impl(input=input, weight=weight, **{**settings, "tp_group": self.tp_group})


class NormedRowLinear(RowLinear):
    """Gemma's product: its output is normalised before the layer adds it to the residual."""

    def __init__(self, *sizes: Any, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        config = settings["config"]
        self.post_layernorm = OffsetRmsNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The normalised product, and the bias that is left to add: none."""
        output, bias = super().forward(input_)
        assert bias is None, "a norm behind a bias that is added later would be another function"
        return self.post_layernorm(output), bias


class ValueHead(MegatronModule):
    """The critic's output layer, hidden -> 1 without bias: one number per position. It starts at zero, so that first
    values are not noise. The weight has the model's dtype; the product is taken in float32.

    Replicated over tensor-parallel ranks: it is far too small to be worth splitting.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, labels: int = 1) -> None:
        super().__init__(config=config)
        size = (labels, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, " n"]:
        """Values, float32."""
        return hidden.float() @ self.weight[0].float()


class ScoreHead(ValueHead):
    """A reward model's output layer, hidden -> labels without bias: its only output is the score, and of several the
    probability of one."""

    label: int | None = None
    """Number of the label whose probability is the score; None: there is one output."""

    def forward(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, " n"]:
        """Scores, float32."""
        if self.label is None:
            return super().forward(hidden)
        return torch.softmax(hidden.float() @ self.weight.float().T, dim=-1)[:, self.label]
