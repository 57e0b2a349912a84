"""Llama 1 to 3, and what was published as Llama: deepseek-llm, SmolLM."""

from ppoctl.convert.families.decoder import (
    DEFAULTS,
    IGNORES,
    INPUT_NORM,
    MLP,
    MLP_NORM,
    PROJECTION,
    QKV,
    READS,
    REQUIRES,
    divided_by_heads,
)
from ppoctl.convert.families.family import Family
from ppoctl.convert.fields import From, off

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
    attention=(INPUT_NORM, *QKV, PROJECTION, MLP_NORM),
    mlp=MLP,
)
