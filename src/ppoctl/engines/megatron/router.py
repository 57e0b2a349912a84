"""Which experts a token goes to, and with what weights."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class SoftmaxRouter(TopKRouter):
    """Megatron-Core's, with the choice made in the order of transformers: softmax over all experts in float32, the
    largest of those, divided by their sum where the model says so, cast last.

    Megatron-Core casts to the model's dtype before it chooses: in bfloat16 that makes ties, and another choice of
    experts than the generator's. Its own product of hidden states and weights needs Transformer Engine.
    """

    def __init__(self, *, renormalise: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.renormalise = renormalise

    def gating(self, input: Float[Tensor, "N 1 hidden"]) -> Float[Tensor, "N 1 experts"]:
        """Logits, in the model's dtype."""
        return F.linear(input, self.weight)

    def routing(
        self, logits: Float[Tensor, "N 1 experts"], padding_mask: None = None
    ) -> tuple[Float[Tensor, "N experts"], Bool[Tensor, "N experts"]]:
        """Weight of each expert for each token, 0 where not chosen; and which are chosen."""
        assert padding_mask is None, "packed sequences have no padding"
        logits = logits.view(-1, self.num_experts)
        weights, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(self.topk, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, value=True)
        return probs, routing_map
