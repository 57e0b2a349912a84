"""Causal attention with capped scores (Gemma 2), over packed sequences.

Neither torch's scaled-dot-product attention nor its variable-length kernel caps scores. On CPU and GPU, this module
therefore materializes the scores, one sequence at a time. Memory grows with the square of the sequence length.
"""

from typing import Any

import torch
from jaxtyping import Float
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ppoctl.engines.megatron.attention import PackedCausalAttention, pieces, sees
from ppoctl.engines.megatron.packed_input import PackedInput


class CappedAttention(PackedCausalAttention):
    """Causal attention with capped scores. `softcap`: c in c tanh(score / c)."""

    def __init__(self, config: TransformerConfig, *, softcap: float, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.softcap = softcap

    def attend_pieces(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedInput) -> Float[Tensor, "N H D"]:
        return torch.cat([self._attend_piece(*piece) for piece in pieces(query, key, value, packed)])

    def _attend_piece(
        self, query: Float[Tensor, "S H D"], key: Float[Tensor, "T G D"], value: Float[Tensor, "T G D"]
    ) -> Float[Tensor, "S H D"]:
        """Return the attention output of one piece. As in transformers, scores are in the model's dtype, and the
        softmax is in float32."""
        grouped = query.unflatten(1, (key.shape[1], -1))  # [S, groups, heads per group, D]
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores = torch.einsum("sghd,tgd->ghst", grouped, key) * scale
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~sees(len(query), len(key), query.device, self.window), -torch.inf)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.einsum("ghst,tgd->sghd", weights, value).flatten(1, 2)
