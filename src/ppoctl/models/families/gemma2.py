"""Gemma 2: four norms in a layer, capped scores and logits, and a sliding window in every other layer. Embeddings are
scaled at the input, and tied to the output layer."""

from ppoctl.models.families.llama import DEFAULTS, IGNORES, READS, divided_by_heads
from ppoctl.models.shape_fields import Family, From, Only, off


def _windows(layer_types: list[str] | None, window: int | None, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer. Without `layer_types`, every other layer has the window."""
    if layer_types is None:
        return tuple(None if layer % 2 else window for layer in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


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
        "layer_types": lambda kinds: set(kinds or ()) <= {"sliding_attention", "full_attention"},
    },
    # `hidden_act` is an older name that transformers no longer reads; the cache matters only to a generator.
    ignores=IGNORES | {"hidden_act", "cache_implementation"},
    constants={"norm_offset": True, "post_norms": True},
)
