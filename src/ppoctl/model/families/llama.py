"""Llama 1 to 3, and what was published as Llama: deepseek-llm, SmolLM. Other families are told as differences from
it."""

from typing import Any

from ppoctl.model.fields import Allowed, Family, From, Only, UnsupportedValueError, off
from ppoctl.model.rope import read_rope


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
    """Channels of a head, in families where they are the hidden size divided by the heads whatever `head_dim` says.
    Raises UnsupportedValueError where the heads do not divide it."""
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
"""Defaults of fields that most families have; each adds its own."""
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
)
