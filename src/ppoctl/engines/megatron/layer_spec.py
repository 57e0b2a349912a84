"""Which modules a transformer layer is made of. The one place to add another backend (Transformer Engine)."""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from ppoctl.engines.megatron.attention import PackedCausalAttention


def layer_spec(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """`num_layers` layers on plain torch, for CPU and GPU alike, with attention over packed sequences."""
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PackedCausalAttention,
                    linear_proj=RowLinear,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=ModuleSpec(
                module=MLP,
                params={"ffn_hidden_size": config.ffn_hidden_size},
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RmsNorm)


class RmsNorm(torch.nn.RMSNorm):
    """torch's, under Megatron-Core's constructor. Where a norm sees only its rank's share of the positions, its
    gradient is marked to be summed over the tensor ranks (Megatron-Core's own wrapper refuses that case)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RowLinear(RowParallelLinear):
    """Megatron-Core's, told its tensor-parallel group where this version forgets to (and warns that it should)."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **settings: Any) -> Tensor:
        return super()._forward_impl(input=input, weight=weight, **{**settings, "tp_group": self.tp_group})
