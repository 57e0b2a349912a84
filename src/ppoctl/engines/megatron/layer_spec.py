"""Which modules a transformer layer is made of. The one place to add another backend (Transformer Engine)."""

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from ppoctl.convert.shape import ExpertShape, LatentShape, ModelShape
from ppoctl.engines.megatron.attention import PackedCausalAttention
from ppoctl.engines.megatron.latent_attention import LatentAttention, LatentAttentionSubmodules
from ppoctl.engines.megatron.router import SigmoidRouter, SoftmaxRouter


def layer_spec(config: TransformerConfig, shape: ModelShape, layers: range) -> TransformerBlockSubmodules:
    """The model's layers of these numbers on plain torch, for CPU and GPU alike, with attention over packed
    sequences."""
    plain = _layer(shape, _mlp(config))
    if shape.experts is None:
        return TransformerBlockSubmodules(layer_specs=[plain] * len(layers), layer_norm=RmsNorm)
    mixed = _layer(shape, _experts(shape.experts))
    specs = [mixed if shape.experts.layers[number] else plain for number in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RmsNorm)


def _layer(shape: ModelShape, mlp: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=_attention(shape) if shape.latent is None else _latent_attention(shape.latent),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(shape: ModelShape) -> ModuleSpec:
    head_norm = RmsNorm if shape.qk_norm else None
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCausalAttention,
            linear_proj=RowLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention(latent: LatentShape) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"latent": latent},
        submodules=LatentAttentionSubmodules(
            linear_to_heads=ColumnParallelLinear,
            core_attention=PackedCausalAttention,
            linear_proj=RowLinear,
            norm=RmsNorm,
        ),
    )


def _mlp(config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(module=MLP, params={"ffn_hidden_size": config.ffn_hidden_size}, submodules=_gated_mlp())


def _experts(experts: ExpertShape) -> ModuleSpec:
    """One expert after the other: grouped products need CUDA extensions."""
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=_router(experts),
            experts=ModuleSpec(module=SequentialMLP, submodules=_gated_mlp()),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_gated_mlp()),
        ),
    )


def _router(experts: ExpertShape) -> Any:
    if experts.sigmoid is None:
        return partial(SoftmaxRouter, renormalise=experts.renormalise)
    return partial(SigmoidRouter, renormalise=experts.renormalise, how=experts.sigmoid)


def _gated_mlp() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowLinear)


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
