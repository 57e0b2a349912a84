"""Qwen2 and Qwen2.5, models distilled into them (DeepSeek-R1-Distill-Qwen), Qwen3, and their mixtures of experts."""

from dataclasses import replace
from functools import partial

from ppoctl.models.families.llama import DEFAULTS, IGNORES, READS, REQUIRES
from ppoctl.models.shape import ExpertShape
from ppoctl.models.shape_fields import (
    Allowed,
    Family,
    From,
    NestedFields,
    Only,
    UnsupportedValueError,
    off,
    only_full_attention,
)

_NO_WINDOW: dict[str, Allowed] = {
    "use_sliding_window": off,
    "sliding_window": Only(None, 0),
    "layer_types": only_full_attention,
}
"""Qwen's configurations have a sliding window, which no published model enables."""
_DEFAULTS = {**DEFAULTS, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768}
_EXPERT_IGNORES = frozenset({"router_aux_loss_coef", "output_router_logits"})
"""Fields of a load-balancing loss over the tokens of a microbatch. The loss of a recipe is another
(`actor.router_aux_loss_coef`)."""


def _layers_with_experts(dense: list[int] | None, step: int, layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts. A layer has experts if it is not in `mlp_only_layers` and its number,
    counted from 1, is a multiple of `decoder_sparse_step`."""
    return tuple(layer not in (dense or ()) and (layer + 1) % step == 0 for layer in range(layers))


def fewer_than_all(per_token: int, experts: int) -> int:
    """Return the number of experts that a token is routed to. Raises UnsupportedValueError if a layer has fewer
    experts."""
    if per_token > experts:
        raise UnsupportedValueError("a token cannot be routed to more experts than a layer has")
    return per_token


def _expert_reads(count: str) -> dict[str, From]:
    """Return the mapping of Qwen's fields for the mixture of experts. `count` names the field with the number of
    experts."""
    return {
        "count": From(count),
        "per_token": From(f"num_experts_per_tok {count}", fewer_than_all),
        "ffn_hidden_size": From("moe_intermediate_size"),
        "renormalise": From("norm_topk_prob"),
        "layers": From("mlp_only_layers decoder_sparse_step num_hidden_layers", _layers_with_experts),
    }


QWEN2 = Family(
    classes="Qwen2",
    reads=READS,
    defaults=_DEFAULTS,
    requires={**REQUIRES, **_NO_WINDOW, "use_mrope": off},
    ignores=IGNORES | {"max_window_layers"},
    constants={"qkv_bias": True},
    call_format="hermes",
)
"""Qwen2: Llama with biases on queries, keys and values."""

QWEN2_MOE = replace(
    QWEN2,
    classes="Qwen2Moe",
    reads={
        **QWEN2.reads,
        "experts": NestedFields(
            partial(ExpertShape, shared_gate=True),
            {**_expert_reads("num_experts"), "shared_ffn_hidden_size": From("shared_expert_intermediate_size")},
        ),
    },
    defaults={
        **QWEN2.defaults,
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    requires={**QWEN2.requires, "qkv_bias": Only(True)},  # noqa: FBT003 - a value
    ignores=QWEN2.ignores | _EXPERT_IGNORES,
)
"""Qwen1.5's mixture of experts: Qwen2 with experts in place of the MLP of some or all layers. Each of these layers
also has a shared expert for every token, gated by the sigmoid of one number per token."""

QWEN3 = Family(
    classes="Qwen3",
    reads=READS,
    defaults={**_DEFAULTS, "head_dim": 128},
    requires={**REQUIRES, **_NO_WINDOW, "attention_bias": off},
    ignores=IGNORES | {"max_window_layers"},
    constants={"qk_norm": True},
    call_format="hermes",
)
"""Qwen3: queries and keys of each head are normalized, and have no biases."""

QWEN3_MOE = replace(
    QWEN3,
    classes="Qwen3Moe",
    reads={**QWEN3.reads, "experts": NestedFields(ExpertShape, _expert_reads("num_local_experts"))},
    defaults={
        **_DEFAULTS,
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    renamed={"num_experts": "num_local_experts"},
    ignores=QWEN3.ignores | _EXPERT_IGNORES,
)
"""Qwen3 with experts in place of the MLP of some or all layers."""
