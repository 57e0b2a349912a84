"""Gemma 2 and the text models of Gemma 3: four norms in a layer, and layers with a sliding window between layers with
full attention. Embeddings are scaled at the input, and tied to the output layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ppoctl.models.families.llama import DEFAULTS, IGNORES, READS, divided_by_heads
from ppoctl.models.rope import LinearScaling, Rope, read_rope
from ppoctl.models.shape_fields import Family, From, Only, UnsupportedValueError, off

_FULL, _WINDOW = "full_attention", "sliding_attention"


def _windows(
    layer_types: list[str] | None, window: int | None, layers: int, pattern: int = 2
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer. Without `layer_types`, every layer has the window, except each layer
    whose number, counted from 1, is a multiple of `pattern`."""
    if layer_types is None:
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    return tuple(window if kind == _WINDOW else None for kind in layer_types)


def _rope(parameters: Mapping[str, Any], kind: str) -> Rope:
    """Return the RoPE of layers of this kind. Raises UnsupportedValueError for unsupported parameters."""
    if parameters.keys() != {_FULL, _WINDOW}:
        raise UnsupportedValueError(f"supported: one table for `{_FULL}`, and one for `{_WINDOW}`")
    rope = read_rope(parameters[kind])
    if not isinstance(rope.scaling, LinearScaling | None):
        raise UnsupportedValueError("supported: plain RoPE; linear with factor")
    return rope


GEMMA2 = Family(
    classes="Gemma2",
    reads={
        **READS,
        "hidden_size": From("hidden_size num_attention_heads", divided_by_heads),
        "activation": From("hidden_activation"),
        "embedding_scale": From("hidden_size", lambda hidden: hidden**0.5),
        "attention_scale": From("query_pre_attn_scalar", lambda scalar: scalar**-0.5),
        "attention_softcap": From("attn_logit_softcapping"),
        "logit_softcap": From("final_logit_softcapping"),
        "windows": From("layer_types sliding_window num_hidden_layers", _windows),
    },
    defaults={
        **DEFAULTS,
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    requires={
        "hidden_activation": Only("gelu_pytorch_tanh"),
        "attention_bias": off,
        "attention_dropout": off,
        "use_bidirectional_attention": off,
        "layer_types": lambda kinds: set(kinds or ()) <= {_WINDOW, _FULL},
    },
    # `hidden_act` is an older name that transformers no longer reads; the cache matters only to a generator.
    ignores=IGNORES | {"hidden_act", "cache_implementation"},
    constants={"norm_offset": True, "post_norms": True},
)
"""Gemma 2: scores and logits are capped, and every other layer has a sliding window."""

GEMMA3 = replace(
    GEMMA2,
    classes="Gemma3",
    classifier="Gemma3TextForSequenceClassification",
    reads={
        **{name: of for name, of in GEMMA2.reads.items() if "softcap" not in name},
        "rope": From("rope_parameters", partial(_rope, kind=_FULL)),
        "window_rope": From("rope_parameters", partial(_rope, kind=_WINDOW)),
        "windows": From("layer_types sliding_window num_hidden_layers sliding_window_pattern", _windows),
    },
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    rope_thetas={_FULL: 1_000_000.0, _WINDOW: 10_000.0},
    requires={
        **GEMMA2.requires,
        "sliding_window": lambda window: window is not None,
        # No published model has a cap, and vLLM does not read that of scores.
        "attn_logit_softcapping": Only(None),
        "final_logit_softcapping": Only(None),
    },
    # transformers writes this field, but reads `layer_types` instead.
    ignores=GEMMA2.ignores | {"_sliding_window_pattern"},
    constants={**GEMMA2.constants, "qk_norm": True},
)
"""Gemma 3: queries and keys of each head are normalized, five of six layers have a sliding window, and these layers
have RoPE of their own."""
