"""Qwen2 and Qwen2.5, and what was distilled into them: DeepSeek-R1-Distill-Qwen. Llama with biases on queries, keys
and values."""

from ppoctl.convert.families.decoder import (
    DEFAULTS,
    IGNORES,
    INPUT_NORM,
    MLP,
    MLP_NORM,
    PROJECTION,
    QKV,
    QKV_BIAS,
    READS,
    REQUIRES,
)
from ppoctl.convert.families.family import Family
from ppoctl.convert.fields import Allowed, Only, off, only_full_attention

NO_WINDOW: dict[str, Allowed] = {
    "use_sliding_window": off,
    "sliding_window": Only(None, 0),
    "layer_types": only_full_attention,
}
"""Qwen's configurations have a sliding window that none of the published models turns on."""

QWENS = {**DEFAULTS, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768}
"""Of a configuration of Qwen2 or 3."""

QWEN2 = Family(
    classes="Qwen2",
    reads=READS,
    defaults=QWENS,
    requires={**REQUIRES, **NO_WINDOW, "use_mrope": off},
    ignores=IGNORES | {"max_window_layers"},
    constants={"qkv_bias": True},
    attention=(INPUT_NORM, *QKV, *QKV_BIAS, PROJECTION, MLP_NORM),
    mlp=MLP,
)
