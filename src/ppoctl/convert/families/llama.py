"""Llama 1 to 3, and what was published as Llama: deepseek-llm, SmolLM."""

from ppoctl.convert.families.decoder import IGNORES, INPUT_NORM, MLP, MLP_NORM, PROJECTION, QKV, READS, REQUIRES
from ppoctl.convert.families.family import Family
from ppoctl.convert.fields import off

LLAMA = Family(
    classes="Llama",
    reads=READS,
    requires={**REQUIRES, "attention_bias": off, "mlp_bias": off},
    ignores=IGNORES | {"pretraining_tp"},
    attention=(INPUT_NORM, *QKV, PROJECTION, MLP_NORM),
    mlp=MLP,
)
