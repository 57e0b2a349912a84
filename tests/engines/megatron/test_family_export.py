"""A trained model, exported as a Hugging Face folder, is the same model to transformers and to vLLM: every family.

On a CPU vLLM loads new expert weights in place incorrectly without an error, so a generator gets them through a
folder.
"""

from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from export_lab import check_export

FAMILIES = [
    "gemma2",
    "gemma3",
    "llama",
    "llama-linear-rope",
    "mistral",
    "qwen2",
    "qwen2-yarn",
    "qwen2-moe",
    "qwen3",
    "qwen3-moe",
]


def peaked_model(kind: str, folder: Path) -> Path:
    """Write a model with heads of 32 channels, the narrowest that vLLM's CPU attention supports."""
    torch.manual_seed(0)
    model, config, overrides = lab.MODELS[kind]
    sizes = {**lab.SIZES, **overrides, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 32, "moe_intermediate_size": 64, "initializer_range": 0.2}
    if "moe" not in kind:
        del sizes["moe_intermediate_size"]
    folder.mkdir()
    model(config(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_and_vllm_load_export_of_every_family(tmp_path, kind):
    check_export(peaked_model(kind, tmp_path / "source"), tmp_path / "target")
