"""Qwen3: queries and keys are normalised head by head, and have no biases."""

from ppoctl.convert.families.decoder import (
    HEAD_NORMS,
    IGNORES,
    INPUT_NORM,
    MLP,
    MLP_NORM,
    PROJECTION,
    QKV,
    READS,
    REQUIRES,
)
from ppoctl.convert.families.family import Family
from ppoctl.convert.families.qwen2 import NO_WINDOW, QWENS
from ppoctl.convert.fields import off

QWEN3 = Family(
    classes="Qwen3",
    reads=READS,
    defaults={**QWENS, "head_dim": 128},
    requires={**REQUIRES, **NO_WINDOW, "attention_bias": off},
    ignores=IGNORES | {"max_window_layers"},
    constants={"qk_norm": True},
    attention=(INPUT_NORM, *QKV, *HEAD_NORMS, PROJECTION, MLP_NORM),
    mlp=MLP,
)
