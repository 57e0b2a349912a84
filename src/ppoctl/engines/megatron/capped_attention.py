"""Causal attention with capped scores and a sliding window (Gemma 2), over packed sequences.

Neither torch's scaled-dot-product attention nor its variable-length kernel caps scores, so they are written out, one
sequence at a time, on CPU and GPU alike: memory grows with the square of a sequence's length.
"""

from typing import Any

import torch
from jaxtyping import Float
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ppoctl.engines.megatron.attention import PackedCausalAttention, pieces, sees
from ppoctl.engines.megatron.packed_input import PackedInput


class CappedAttention(PackedCausalAttention):
    """`softcap`: c of c tanh(score / c), None: scores as they are. `window`: how many tokens a token sees, itself
    included, None: all before it."""

    def __init__(
        self, config: TransformerConfig, *, softcap: float | None, window: int | None, **settings: Any
    ) -> None:
        super().__init__(config, **settings)
        self.softcap = softcap
        self.window = window

    def attend_pieces(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedInput) -> Float[Tensor, "N H D"]:
        return torch.cat([self._one(*piece) for piece in pieces(query, key, value, packed)])

    def _one(
        self, query: Float[Tensor, "S H D"], key: Float[Tensor, "T G D"], value: Float[Tensor, "T G D"]
    ) -> Float[Tensor, "S H D"]:
        """Attention output of one piece; scores in the model's dtype, softmax in float32, as in transformers."""
        grouped = query.unflatten(1, (key.shape[1], -1))  # S, groups, heads of a group, D
        scores = torch.einsum("sghd,tgd->ghst", grouped, key) * self.softmax_scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~sees(len(query), len(key), query.device, self.window), -torch.inf)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.einsum("ghst,tgd->sghd", weights, value).flatten(1, 2)
