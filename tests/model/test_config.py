"""config.json read without transformers, compared with transformers: omitted fields, older names, invalid values."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ppoctl.core.errors import RecipeError
from ppoctl.models.config import completed
from ppoctl.models.families import FAMILIES
from ppoctl.models.shape_reader import shape_of

ROOT = Path(__file__).parents[2]


def theirs(folder: Path, written: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(written), "utf-8")
    return dict(AutoConfig.from_pretrained(folder).to_dict())


def judged(config: dict[str, Any], folder: Path) -> object:
    """Return the model, or the first words of the error."""
    try:
        return shape_of(config, folder)
    except RecipeError as error:
        return error.message.split(" is not supported")[0]


OLD_ROPE = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 4, "max_position_embeddings": 512}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    "said",
    [
        {},
        {**SIZES, "num_key_value_heads": None} | {"rope_theta": 7e4},
        {**SIZES, "num_key_value_heads": 6, **OLD_ROPE, "torch_dtype": "bfloat16", "temperature": 0.5},
        {**SIZES, "num_key_value_heads": 6, "rope_theta": 3e4, "rope_scaling": YARN, "num_labels": 1},
        {**SIZES, "num_key_value_heads": 6, "rope_parameters": {**LLAMA3, "rope_theta": 9e4}, "attention_bias": True},
        {**SIZES, "num_key_value_heads": 6, "num_experts": 7, "num_local_experts": 9, "rope_parameters": None},
        {**SIZES, "num_key_value_heads": 6, "partial_rotary_factor": 0.5, "sliding_window": 32},
        {**SIZES, "num_key_value_heads": 6, "use_sliding_window": False, "sliding_window": 32},
        {**SIZES, "num_key_value_heads": 6, "use_sliding_window": True, "sliding_window": 32, "surprise": [1]},
    ],
    ids=["nothing", "theta", "linear, old", "yarn", "llama3", "experts", "partial", "window off", "window"],
)
def test_config_defaults_match_transformers(tmp_path: Path, family: str, said: dict[str, Any]) -> None:
    if family in ("gemma2", "mistral", "qwen3_moe") and "num_key_value_heads" in said:
        said = {**said, "num_key_value_heads": 6}  # transformers does not accept null for this field
    written = {"model_type": family, **said}
    expected, actual = (
        judged(theirs(tmp_path, written), tmp_path),
        judged(completed(written, FAMILIES[family]), tmp_path),
    )
    if isinstance(expected, str):
        assert isinstance(actual, str)
    else:
        assert actual == expected
