"""Small modules with Megatron-Core's constructors: norms, linear layers followed by a norm, the critic's head.

If a norm sees only its rank's slice of the positions, its gradient is marked to be summed over the tensor ranks
(Megatron-Core's own wrapper of norms rejects that case).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ppoctl.engines.megatron.low_rank import AdaptableSplit


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMS norm: x / rms(x) * weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class OffsetRmsNorm(RmsNorm):
    """Gemma's RMS norm: x / rms(x) * (1 + weight), in float32. The weight is stored without the 1, as in the
    checkpoint, so that it is not rounded."""

    def forward(self, x: Float[Tensor, "*positions hidden"]) -> Float[Tensor, "*positions hidden"]:
        """Return the normalized positions, in the dtype of `x`."""
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class ColumnLinear(AdaptableSplit, ColumnParallelLinear):
    """A linear layer whose output dimension is split over tensor ranks."""

    def forward(self, input_: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output with that of the adapters, and the bias that remains to be added."""
        output, bias = super().forward(input_, *given, **named)
        return self.with_adapters(output, input_), bias


class RowLinear(AdaptableSplit, RowParallelLinear):
    """A linear layer whose input dimension is split over tensor ranks. The layer passes the group of tensor ranks:
    this version of Megatron-Core omits the group, and then warns that it is missing."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output with that of the adapters, and the bias that remains to be added."""
        output, bias = super().forward(input_)
        return self.with_adapters(output, input_), bias

    def _forward_impl(self, input: Tensor, weight: Tensor, **settings: Any) -> Tensor:
        return super()._forward_impl(input=input, weight=weight, **{**settings, "tp_group": self.tp_group})


class NormedRowLinear(RowLinear):
    """Gemma's linear layer before a residual connection: a norm is applied to its output before the residual is
    added."""

    def __init__(self, *sizes: Any, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        config = settings["config"]
        self.post_layernorm = OffsetRmsNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the normalized output, and the bias that remains to be added: None."""
        output, bias = super().forward(input_)
        assert bias is None, "a bias that is added after the norm would be a different function"
        return self.post_layernorm(output), bias


class ValueHead(MegatronModule):
    """The critic's output layer, hidden -> 1 without bias: one number per position. The weight is initialized with
    zeros, so that the first values are not noise. The weight has the model's dtype. The product is computed in
    float32.

    Each tensor rank has a copy of the weight, since the weight is very small.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, labels: int = 1) -> None:
        super().__init__(config=config)
        size = (labels, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, " n"]:
        """Return values, float32."""
        return hidden.float() @ self.weight[0].float()


class ScoreHead(ValueHead):
    """A reward model's output layer, hidden -> labels without bias. A single output is the score. With several
    labels, the score is the probability of one of them."""

    label: int | None = None
    """Index of the label whose probability is the score. None: the head has one output."""

    def forward(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, " n"]:
        """Return scores, float32."""
        if self.label is None:
            return super().forward(hidden)
        return torch.softmax(hidden.float() @ self.weight.float().T, dim=-1)[:, self.label]
