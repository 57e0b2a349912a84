"""Mistral 7B, Nemo and Small as published up to version 3: Llama, with a sliding window in every layer (7B v0.1) or
in none."""

from ppoctl.models.families.llama import DEFAULTS, IGNORES, READS, REQUIRES
from ppoctl.models.shape_fields import Family, From


def _windows(window: int | None, layers: int) -> tuple[int | None, ...]:
    return () if window is None else (window,) * layers


MISTRAL = Family(
    classes="Mistral",
    reads={**READS, "windows": From("sliding_window num_hidden_layers", _windows)},
    defaults={
        **DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    requires=REQUIRES,
    ignores=IGNORES,
    call_format="mistral",
)
