"""Llama 1 to 3, and models published as Llama: deepseek-llm, SmolLM. Other families are defined as differences from
Llama."""

from typing import Any

from ppoctl.models.rope import read_rope
from ppoctl.models.shape_fields import Allowed, Family, From, Only, UnsupportedValueError, off


def _groups(groups: int | None, heads: int) -> int:
    if groups is not None and heads % groups:
        raise UnsupportedValueError("the number of query heads must be a multiple of the number of key/value heads")
    return groups or heads


def _head_dim(channels: int | None, hidden: int, heads: int) -> int:
    if channels is None and hidden % heads:
        raise UnsupportedValueError("the number of heads must divide the hidden size, or `head_dim` must be set")
    head_dim = channels or hidden // heads
    if head_dim % 2:
        raise UnsupportedValueError("a head must have an even number of channels, because RoPE rotates pairs")
    return head_dim


def divided_by_heads(hidden: int, heads: int) -> int:
    """Return the hidden size. Raises UnsupportedValueError if the number of heads does not divide the hidden size.
    These families require this even if `head_dim` is set."""
    if hidden % heads:
        raise UnsupportedValueError("the number of heads must divide the hidden size")
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
"""Defaults that most families have; each family adds its own."""
REQUIRES: dict[str, Allowed] = {"hidden_act": Only("silu"), "attention_dropout": Only(0, 0.0)}
IGNORES = frozenset({"initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"})


LLAMA = Family(
    classes="Llama",
    reads={**READS, "hidden_size": From("hidden_size num_attention_heads", divided_by_heads)},
    defaults={
        **DEFAULTS,
        "num_key_value_heads": None,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    requires={**REQUIRES, "attention_bias": off, "mlp_bias": off},
    ignores=IGNORES | {"pretraining_tp"},
    call_format="llama3_json",
)
