"""The modules of a transformer layer. Code for another backend (Transformer Engine) would be added here."""

from collections.abc import Callable
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from ppoctl.engines.megatron.attention import PackedCausalAttention
from ppoctl.engines.megatron.capped_attention import CappedAttention
from ppoctl.engines.megatron.expert_layer import ExpertLayer
from ppoctl.engines.megatron.latent_attention import LatentAttention, LatentAttentionSubmodules
from ppoctl.engines.megatron.modules import ColumnLinear, NormedRowLinear, OffsetRmsNorm, RmsNorm, RowLinear
from ppoctl.engines.megatron.router import ExpertRouter, SigmoidRouter, SoftmaxRouter
from ppoctl.models.shape import ExpertShape, LatentShape, ModelShape


def layer_spec(shape: ModelShape, layers: range) -> TransformerBlockSubmodules:
    """Return the spec of these layers of the model. The modules use plain torch on CPU and GPU, with attention over
    packed sequences."""
    specs = [_layer(shape, number) for number in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_norm(shape))


def _layer(shape: ModelShape, number: int) -> ModuleSpec:
    norm = _norm(shape)
    return ModuleSpec(
        module=ExpertLayer if shape.has_experts(number) else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_attention(shape, number) if shape.latent is None else _latent_attention(shape.latent),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_experts(shape, number) if shape.has_experts(number) else _mlp(shape),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(shape: ModelShape, number: int) -> ModuleSpec:
    head_norm = _norm(shape) if shape.qk_norm else None
    limits: dict[str, float | None] = {"window": shape.window(number)}
    if shape.keeps_scores:
        limits["softcap"] = shape.attention_softcap
    core = ModuleSpec(module=CappedAttention if shape.keeps_scores else PackedCausalAttention, params=limits)
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=core,
            linear_proj=_last(shape),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention(latent: LatentShape) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"latent": latent},
        submodules=LatentAttentionSubmodules(
            linear_to_heads=ColumnLinear,
            core_attention=PackedCausalAttention,
            linear_proj=RowLinear,
            norm=RmsNorm,
        ),
    )


def _mlp(shape: ModelShape) -> ModuleSpec:
    return ModuleSpec(
        module=MLP, params={"ffn_hidden_size": shape.ffn_hidden_size}, submodules=_gated_mlp(_last(shape))
    )


def _experts(shape: ModelShape, number: int) -> ModuleSpec:
    """Return the spec of a layer's mixture of experts, which runs one expert after the other. Grouped products would
    require CUDA extensions."""
    assert shape.experts is not None
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=_router(shape.experts, number),
            experts=ModuleSpec(module=SequentialMLP, submodules=_gated_mlp(RowLinear)),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_gated_mlp(RowLinear)),
        ),
    )


def _router(experts: ExpertShape, number: int) -> Callable[..., ExpertRouter]:
    place = sum(experts.layers[:number])
    if experts.sigmoid is None:
        return partial(SoftmaxRouter, place=place, renormalise=experts.renormalise)
    return partial(SigmoidRouter, place=place, renormalise=experts.renormalise, how=experts.sigmoid)


def _gated_mlp(last: type[RowLinear]) -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=last)


def _norm(shape: ModelShape) -> type[RmsNorm]:
    return OffsetRmsNorm if shape.norm_offset else RmsNorm


def _last(shape: ModelShape) -> type[RowLinear]:
    """Return the class of the last projection of attention and MLP, whose output is added to the residual."""
    return NormedRowLinear if shape.post_norms else RowLinear
