"""Causal self-attention over packed sequences, as a Megatron-Core core-attention module.

Letters: N packed tokens of this rank, K tokens that these N tokens see, H query heads, G key/value heads, D channels
of a head. Nothing is computed for padding. Sequences cannot see each other: on a CPU each sequence is a separate
call, and on a GPU the kernel receives the boundaries (varlen flash attention). If context ranks split the tokens
(`context_parallel`), a call handles a piece of a sequence. The keys of a piece are the tokens of the sequence up to
the piece's last token. Otherwise each piece is a full sequence.

This module also applies RoPE. Megatron-Core's own packed path reads the sequence lengths from the device and
recomputes sine and cosine twice per layer. Here the model computes sine and cosine once per microbatch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ppoctl.engines.megatron.packed_input import PackedInput, RopeTables


class PackedCausalAttention(MegatronModule):
    """The core attention of `SelfAttention`, between its projections. It has no parameters and no dropout."""

    def __init__(self, config: TransformerConfig, layer_number: int, *, window: int | None = None, **_: Any) -> None:
        """`window`: number of tokens that a token sees, including itself. None: it sees all tokens up to itself."""
        super().__init__(config=config)
        assert config.attention_dropout == 0.0, "PPO trains without dropout"
        self.layer_number = layer_number
        self.softmax_scale = config.softmax_scale
        self.window = window

    def forward(  # noqa: PLR0913 - Megatron-Core's signature
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G D"],
        attention_mask: None,
        *,
        packed_seq_params: PackedInput,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_bias: None = None,
    ) -> Float[Tensor, "N HxD"]:
        """Return the attention output of each token, with the heads concatenated."""
        assert (attention_mask, attention_bias) == (None, None), "packed sequences need no mask"
        assert attn_mask_type is AttnMaskType.causal, "the models trained here are causal"
        rope = packed_seq_params.rope if self.window is None else packed_seq_params.window_rope
        assert rope is not None, "the model fills in the RoPE tables"
        query, key = (apply_rope(x, rope) for x in (query, key))
        return self.attend(query, key, value, packed_seq_params).flatten(1)

    def attend(
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "N G D"],
        value: Float[Tensor, "N G D"],
        packed: PackedInput,
    ) -> Float[Tensor, "N H D"]:
        """Return the attention output for rotated queries and keys. Collective over the context ranks."""
        if packed.context is not None:
            key, value = packed.context.seen(key, value)
        return self.attend_pieces(query, key, value, packed)

    def attend_pieces(
        self,
        query: Float[Tensor, "N H D"],
        key: Float[Tensor, "K G D"],
        value: Float[Tensor, "K G D"],
        packed: PackedInput,
    ) -> Float[Tensor, "N H D"]:
        """Return the attention output of each piece over the keys that it sees."""
        kernel = _varlen if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else _per_piece
        is_wide = self.window is None or self.window >= packed.max_seqlen_kv
        return kernel(query, key, value, packed, self.softmax_scale, None if is_wide else self.window)


def _per_piece(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedInput, scale: float | None, window: int | None = None
) -> Float[Tensor, "N H D"]:
    """Compute attention by torch's scaled-dot-product attention. Each piece is one call on views of the packed
    tensors. A sequence longer than the window has a mask, which takes 4 bytes for each pair of its tokens.

    On a CPU, the computation is always in float32: torch's bfloat16 backward takes 1.5 to 4 times as long for
    sequences up to 500 tokens, and about 0.8 times as long for 1,000 tokens.
    """
    dtype = query.dtype
    if query.is_cuda:
        # With fewer key heads than query heads, torch's only float32 kernel on a GPU keeps all S x S scores.
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    else:
        query, key, value = query.float(), key.float(), value.float()

    def is_causal(queries: int, keys: int) -> bool:
        # With `is_causal`, torch aligns the first query with the first key. That is wrong for a later piece.
        return queries == keys and (window is None or keys <= window)

    outputs = [
        F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=None if is_causal(len(q), len(k)) else sees(len(q), len(k), q.device, window),
            is_causal=is_causal(len(q), len(k)),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        .squeeze(0)
        .transpose(0, 1)
        for q, k, v in pieces(query, key, value, packed)
    ]
    return torch.cat(outputs).to(dtype)


def pieces(query: Tensor, key: Tensor, value: Tensor, packed: PackedInput) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield queries, keys and values of each piece."""
    seen = list(packed.key_lengths)
    return zip(query.split(list(packed.query_lengths)), key.split(seen), value.split(seen), strict=True)


def sees(queries: int, keys: int, device: torch.device, window: int | None = None) -> Bool[Tensor, "queries keys"]:
    """Return which keys (columns) each query (row) sees: the last `window` keys up to the query's position. The last
    query and the last key belong to the same token."""
    own = keys - queries
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(own)
    return causal if window is None else causal.triu(own + 1 - window)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedInput, scale: float | None, window: int | None = None
) -> Float[Tensor, "N H D"]:
    """Compute attention by torch's variable-length flash attention, which requires CUDA and half precision."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        scale=scale,
        # Earlier tokens (-1: all) and no later ones: causal, aligned at the ends of queries and keys.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output


class _Rope(torch.autograd.Function):
    """Rotation of channel pairs (i, i + D/2). Backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, direction=-1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, direction: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (x1, x2), (out1, out2) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=direction)
    return out


def apply_rope(x: Float[Tensor, "N heads D"], tables: RopeTables) -> Float[Tensor, "N heads D"]:
    """Apply rotary position embedding (Su et al. 2021, arXiv:2104.09864) in the half-split layout of Llama and
    Qwen."""
    return _Rope.apply(x, tables.cos, tables.sin)
