"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over packed sequences.

    hidden -> latent [kv_rank] -> norm -> keys without position, values          (per head)
           -> one key with position [rope_dim], shared by all heads
    hidden -> (latent [query_rank] -> norm ->) queries: without position | with position

Letters: N packed tokens, H heads of this tensor rank. Projections to latents are replicated on every tensor rank;
projections from latents to heads are split by heads.

Without Transformer Engine, Megatron-Core's MLASelfAttention splits latents over tensor ranks only to gather them
again. In backward it drops the other ranks' part of the gradient of the shared key. It also reads the sequence
lengths from the device to rotate channels. This module does none of this.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ppoctl.engines.megatron.attention import apply_rope
from ppoctl.engines.megatron.low_rank import Adaptable
from ppoctl.engines.megatron.packed_input import PackedInput
from ppoctl.models.shape import LatentShape


@dataclass(frozen=True)
class LatentAttentionSubmodules:
    """Modules of a `LatentAttention`."""

    linear_to_heads: ModuleSpec | type
    """Column-parallel over tensor ranks."""
    core_attention: ModuleSpec | type
    linear_proj: ModuleSpec | type
    norm: ModuleSpec | type


class LatentAttention(MegatronModule):
    """Latent attention, which replaces `SelfAttention` in a layer."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        latent: LatentShape,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.latent = latent
        self.tp_group = pg_collection.tp
        heads, hidden = config.num_attention_heads, config.hidden_size
        queries = heads * latent.head_dim
        if latent.query_rank is None:
            self.linear_q_proj = self._to_heads(submodules, hidden, queries)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, latent.query_rank)
            self.q_layernorm = self._norm(submodules, latent.query_rank)
            self.linear_q_up_proj = self._to_heads(submodules, latent.query_rank, queries)
        self.linear_kv_down_proj = WholeLinear(config, hidden, latent.kv_rank + latent.rope_dim)
        self.kv_layernorm = self._norm(submodules, latent.kv_rank)
        keys_and_values = heads * (latent.nope_dim + latent.value_dim)
        self.linear_kv_up_proj = self._to_heads(submodules, latent.kv_rank, keys_and_values)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            pg_collection=pg_collection,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * latent.value_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=pg_collection.tp,
        )

    def forward(
        self,
        hidden_states: Float[Tensor, "n 1 hidden"],
        attention_mask: None,
        *,
        packed_seq_params: PackedInput,
        **_: Any,
    ) -> tuple[Float[Tensor, "n 1 hidden"], None]:
        """Return the attention output, and None instead of a bias. n: number of tokens in this rank's slice with
        sequence parallelism, else N."""
        assert attention_mask is None, "packed sequences need no mask"
        query = self._query(hidden_states, packed_seq_params)
        key, value = self._key_and_value(hidden_states, packed_seq_params)
        # Kernels require values as wide as keys: pad the channels of values with zeros, and remove the padding from
        # the output.
        wide = F.pad(value, (0, self.latent.head_dim - self.latent.value_dim))
        attended = self.core_attention.attend(query, key, wide, packed_seq_params)[..., : self.latent.value_dim]
        output, _ = self.linear_proj(attended.flatten(1)[:, None])
        return output, None

    def _query(self, hidden: Tensor, packed: PackedInput) -> Float[Tensor, "N H head"]:
        latent = self.latent
        if latent.query_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        plain, rotary = _by_heads(query, latent.head_dim).split([latent.nope_dim, latent.rope_dim], dim=-1)
        return torch.cat([plain, _rotate(rotary, packed)], dim=-1)

    def _key_and_value(
        self, hidden: Tensor, packed: PackedInput
    ) -> tuple[Float[Tensor, "N H head"], Float[Tensor, "N H value"]]:
        latent = self.latent
        compressed, shared = self.linear_kv_down_proj(hidden).split([latent.kv_rank, latent.rope_dim], dim=-1)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        plain, value = _by_heads(both, latent.nope_dim + latent.value_dim).split(
            [latent.nope_dim, latent.value_dim], dim=-1
        )
        rotary = _rotate(self._for_all_heads(shared), packed)
        return torch.cat([plain, rotary.expand(-1, plain.shape[1], -1)], dim=-1), value

    def _for_all_heads(self, shared: Float[Tensor, "n 1 rope"]) -> Float[Tensor, "N 1 rope"]:
        """Return the shared key of all tokens, on every tensor rank. Backward sums the gradients of the ranks'
        heads."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(shared, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(shared, group=self.tp_group)

    def _to_heads(self, submodules: LatentAttentionSubmodules, inputs: int, outputs: int) -> Any:
        return build_module(
            submodules.linear_to_heads,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )

    def _norm(self, submodules: LatentAttentionSubmodules, size: int) -> Any:
        return build_module(submodules.norm, config=self.config, hidden_size=size, eps=self.latent.norm_eps)


class WholeLinear(Adaptable):
    """A linear layer without bias whose complete weight is on every tensor rank. With sequence parallelism, each rank
    applies the layer to its own tokens, and the weight is marked so that its gradients are summed over the tensor
    ranks."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Float[Tensor, "n 1 inputs"]) -> Float[Tensor, "n 1 outputs"]:
        return self.with_adapters(F.linear(x, self.weight), x)


def _by_heads(x: Float[Tensor, "N 1 HxD"], channels: int) -> Float[Tensor, "N H D"]:
    return x.view(len(x), -1, channels)


def _rotate(x: Float[Tensor, "N heads rope"], packed: PackedInput) -> Float[Tensor, "N heads rope"]:
    """Apply RoPE to pairs of neighbouring channels (2i, 2i + 1), and move each pair to (i, i + rope_dim / 2). The
    channels of queries and keys are moved alike, so the products of queries and keys do not change."""
    assert packed.rope is not None, "the model fills in the RoPE tables"
    return apply_rope(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1), packed.rope)
