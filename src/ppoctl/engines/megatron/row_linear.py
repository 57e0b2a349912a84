"""Products whose weight tensor ranks split by columns, and what Gemma does behind them."""

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

from ppoctl.engines.megatron.norms import OffsetRmsNorm


class RowLinear(RowParallelLinear):
    """Megatron-Core's, told its tensor-parallel group where this version forgets to (and warns that it should)."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **settings: Any) -> Tensor:
        return super()._forward_impl(input=input, weight=weight, **{**settings, "tp_group": self.tp_group})


class NormedRowLinear(RowLinear):
    """What it says is normalised before the layer adds it to the residual."""

    def __init__(self, *sizes: Any, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        config = settings["config"]
        self.post_layernorm = OffsetRmsNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The normalised product, and the bias that is left to add: none."""
        output, bias = super().forward(input_)
        assert bias is None, "a norm behind a bias that is added later would be another function"
        return self.post_layernorm(output), bias
