"""DeepSeek-V3, and Moonlight, which was published under the same `model_type`. They have latent attention, and many
small experts in addition to a shared expert. Sigmoids and a bias choose the small experts. The first layers have one
MLP instead of experts. Multi-token prediction layers are not supported: a checkpoint with such layers is rejected
with the name of their first tensor."""

import math
from collections.abc import Mapping
from typing import Any

from ppoctl.models.families.llama import DEFAULTS, IGNORES, READS, REQUIRES
from ppoctl.models.families.qwen import fewer_than_all
from ppoctl.models.rope import YarnScaling, read_rope
from ppoctl.models.shape import ExpertShape, LatentShape, SigmoidRouting
from ppoctl.models.shape_fields import Family, From, NestedFields, Only, UnsupportedValueError, off, on


def _values_fit(value: int, nope: int, rope: int) -> int:
    if value > nope + rope:
        raise UnsupportedValueError("values must not be wider than keys")
    return value


def _shared(count: int | None, width: int) -> int:
    if not count:
        raise UnsupportedValueError("only models with shared experts are supported")
    return count * width


def _groups(groups: int, experts: int) -> int:
    if experts % groups or experts // groups < 2:
        raise UnsupportedValueError("groups must have the same number of experts, at least two")
    return groups


def _attention_scale(parameters: Mapping[str, Any], nope: int, rope: int) -> float | None:
    """Return the factor of queries times keys. In this family, YaRN's growth factor applies to all channels, not only
    to the channels that RoPE rotates."""
    scaling = read_rope(parameters).scaling
    if not isinstance(scaling, YarnScaling):
        return None
    return scaling.growth(scaling.mscale_all_dim) ** 2 / math.sqrt(nope + rope)


def _plain_or_yarn(parameters: Mapping[str, Any]) -> Any:
    rope = read_rope(parameters)
    if rope.scaling is not None and not isinstance(rope.scaling, YarnScaling):
        raise UnsupportedValueError("only plain RoPE and YaRN are supported")
    return rope


def _equal_heads(groups: int | None, heads: int) -> int:
    if groups not in (None, heads):
        raise UnsupportedValueError("the number of key/value heads must equal the number of query heads")
    return heads


def _layers(first_dense: int, layers: int) -> tuple[bool, ...]:
    return tuple(layer >= first_dense for layer in range(layers))


DEEPSEEK_V3 = Family(
    classes="DeepseekV3",
    reads={
        **READS,
        "num_kv_heads": From("num_key_value_heads num_attention_heads", _equal_heads),
        "head_dim": From("qk_nope_head_dim qk_rope_head_dim", lambda nope, rope: nope + rope),
        "rope": From("rope_parameters", _plain_or_yarn),
        "attention_scale": From("rope_parameters qk_nope_head_dim qk_rope_head_dim", _attention_scale),
        "latent": NestedFields(
            LatentShape,
            {
                "query_rank": From("q_lora_rank"),
                "kv_rank": From("kv_lora_rank"),
                "nope_dim": From("qk_nope_head_dim"),
                "rope_dim": From("qk_rope_head_dim"),
                "value_dim": From("v_head_dim qk_nope_head_dim qk_rope_head_dim", _values_fit),
                "norm_eps": From("", lambda: 1e-6),  # a constant in transformers' code, independent of `rms_norm_eps`
            },
        ),
        "experts": NestedFields(
            ExpertShape,
            {
                "count": From("n_routed_experts"),
                "per_token": From("num_experts_per_tok n_routed_experts", fewer_than_all),
                "ffn_hidden_size": From("moe_intermediate_size"),
                "renormalise": From("norm_topk_prob"),
                "layers": From("first_k_dense_replace num_hidden_layers", _layers),
                "shared_ffn_hidden_size": From("n_shared_experts moe_intermediate_size", _shared),
                "sigmoid": NestedFields(
                    SigmoidRouting,
                    {
                        "groups": From("n_group n_routed_experts", _groups),
                        "groups_per_token": From("topk_group"),
                        "scale": From("routed_scaling_factor"),
                    },
                ),
            },
        ),
    },
    defaults={
        **DEFAULTS,
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    renamed={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    requires={
        **REQUIRES,
        "attention_bias": off,
        "rope_interleave": on,  # vLLM ignores it and always pairs neighboring channels
        # Fields of the published code. transformers does not read them and always computes these values.
        "moe_layer_freq": Only(1),
        "scoring_func": Only("sigmoid"),
        "topk_method": Only("noaux_tc"),
    },
    # Ignored fields: copies of other fields; multi-token prediction layers, which are not supported; the location of
    # remote code; the load-balancing loss of pre-training, which a recipe sets; parallelism of other systems.
    ignores=IGNORES
    | {"head_dim", "qk_head_dim", "num_nextn_predict_layers", "auto_map"}
    | {"aux_loss_alpha", "seq_aux", "output_router_logits", "ep_size", "pretraining_tp"},
    call_format="deepseek_v3",
)
