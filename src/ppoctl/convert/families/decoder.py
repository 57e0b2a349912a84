"""What most families share: the fields of a decoder's configuration, and the tensors of its layers."""

from typing import Any

from ppoctl.convert.fields import Allowed, From, Only, UnsupportedValueError
from ppoctl.convert.rope import read_rope
from ppoctl.convert.rows import Place, Row


def _groups(groups: int | None, heads: int) -> int:
    if groups is not None and heads % groups:
        raise UnsupportedValueError("supported are query heads that share key/value heads evenly")
    return groups or heads


def _head_dim(channels: int | None, hidden: int, heads: int) -> int:
    if channels is None and hidden % heads:
        raise UnsupportedValueError("supported are heads that divide the hidden size, or a `head_dim`")
    found = channels or hidden // heads
    if found % 2:
        raise UnsupportedValueError("supported are heads of an even number of channels: RoPE turns pairs of them")
    return found


def divided_by_heads(hidden: int, heads: int) -> int:
    """The hidden size, in families that have it divided by the number of heads whatever `head_dim` says."""
    if hidden % heads:
        raise UnsupportedValueError("supported are heads that divide the hidden size")
    return hidden


READS: dict[str, From] = {
    "num_layers": From("num_hidden_layers"),
    "hidden_size": From("hidden_size"),
    "ffn_hidden_size": From("intermediate_size"),
    "num_heads": From("num_attention_heads"),
    "num_kv_heads": From("num_key_value_heads num_attention_heads", _groups),
    "head_dim": From("head_dim hidden_size num_attention_heads", _head_dim),
    "vocab_size": From("vocab_size"),
    "max_positions": From("max_position_embeddings"),
    "norm_eps": From("rms_norm_eps"),
    "rope": From("rope_parameters", read_rope),
    "tied_embeddings": From("tie_word_embeddings"),
}
DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Of most families; each adds its own."""
REQUIRES: dict[str, Allowed] = {"hidden_act": Only("silu"), "attention_dropout": Only(0, 0.0)}
IGNORES = frozenset({"initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"})

EXPERT_IGNORES = frozenset({"router_aux_loss_coef", "output_router_logits"})
"""They are about a load-balancing loss that PPO does not have: see `engines.megatron.config`."""


def layers_with_experts(dense: list[int] | None, step: int, layers: int) -> tuple[bool, ...]:
    """A layer has experts when it is not in `mlp_only_layers` and its number, counted from 1, is a multiple of
    `decoder_sparse_step`."""
    return tuple(layer not in (dense or ()) and (layer + 1) % step == 0 for layer in range(layers))


def fewer_than_all(per_token: int, experts: int) -> int:
    """Experts of a token, of which there must be so many."""
    if per_token > experts:
        raise UnsupportedValueError("supported are tokens that are routed to at most as many experts as there are")
    return per_token


def expert_reads(count: str) -> dict[str, From]:
    """The mixture of Qwen's configurations; `count`: how they spell the number of experts."""
    return {
        "count": From(count),
        "per_token": From(f"num_experts_per_tok {count}", fewer_than_all),
        "ffn_hidden_size": From("moe_intermediate_size"),
        "renormalise": From("norm_topk_prob"),
        "layers": From("mlp_only_layers decoder_sparse_step num_hidden_layers", layers_with_experts),
    }


def qkv(kind: str, columns: str = "") -> tuple[Row, ...]:
    """Queries, keys and values, fused; `kind`: weight or bias."""
    fused = f"self_attention.linear_qkv.{kind}"
    return (
        Row(f"self_attn.q_proj.{kind}", fused, f"queries* {columns}", Place.QUERY),
        Row(f"self_attn.k_proj.{kind}", fused, f"keys* {columns}", Place.KEY),
        Row(f"self_attn.v_proj.{kind}", fused, f"keys* {columns}", Place.VALUE),
    )


def gated_mlp(theirs: str, ours: str, width: str) -> tuple[Row, ...]:
    """One MLP of this width, under these names."""
    return (
        Row(f"{theirs}.gate_proj.weight", f"{ours}.linear_fc1.weight", f"{width}* hidden", Place.GATE),
        Row(f"{theirs}.up_proj.weight", f"{ours}.linear_fc1.weight", f"{width}* hidden", Place.UP),
        Row(f"{theirs}.down_proj.weight", f"{ours}.linear_fc2.weight", f"hidden {width}*"),
    )


INPUT_NORM = Row("input_layernorm.weight", "input_layernorm.weight", "hidden")
QKV = qkv("weight", "hidden")
QKV_BIAS = qkv("bias")
HEAD_NORMS = (
    Row("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", "head"),
    Row("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", "head"),
)
PROJECTION = Row("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "hidden queries*")
MLP_NORM = Row("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "hidden")
MLP = gated_mlp("mlp", "mlp", "ffn")
ROUTER = Row("mlp.gate.weight", "mlp.router.weight", "experts hidden")
EXPERTS = gated_mlp("mlp.experts.{expert}", "mlp.experts.local_experts.{expert}", "expert_ffn")
