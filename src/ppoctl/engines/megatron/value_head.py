"""The critic's output layer: one number per position. Starts at zero, so that first values are not noise."""

import torch
from jaxtyping import Float
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ValueHead(MegatronModule):
    """hidden -> 1 without bias. The weight has the model's dtype; the product is taken in float32.

    Replicated over tensor-parallel ranks: it is far too small to be worth splitting.
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, " n"]:
        """Values, float32."""
        return hidden.float() @ self.weight[0].float()
