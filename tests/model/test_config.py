"""config.json read without transformers, compared with transformers: omitted fields, older names, invalid values."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ppoctl.core.errors import RecipeError
from ppoctl.models.config import InvalidFieldError, completed
from ppoctl.models.families import FAMILIES
from ppoctl.models.shape import ModelShape
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
BY_LAYER_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
}
TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
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
    if family in ("gemma2", "gemma3_text", "mistral", "qwen3_moe") and "num_key_value_heads" in said:
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


@pytest.mark.parametrize(
    "said",
    [
        {"rope_local_base_freq": 2e4, "sliding_window_pattern": 3},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e5, "_sliding_window_pattern": 3},
        {"rope_parameters": BY_LAYER_TYPE, "layer_types": TYPES},
        {"rope_parameters": {"full_attention": None}, "rope_local_base_freq": 5e3},
    ],
    ids=["bases", "linear, old", "tables", "no table"],
)
def test_rope_of_layer_types_matches_transformers(tmp_path: Path, said: dict[str, Any]) -> None:
    written = {"model_type": "gemma3_text", **SIZES, "num_key_value_heads": 6, **said}
    shape = judged(completed(written, FAMILIES["gemma3_text"]), tmp_path)
    assert isinstance(shape, ModelShape)
    assert shape == judged(theirs(tmp_path, written), tmp_path)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "one table for `full_attention`, and one"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "supported: plain RoPE"),  # which transformers ignores
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512}}, "supported: plain RoPE; linear with"),
    ],
    ids=["one table", "older name", "llama3"],
)
def test_unsupported_rope_of_layer_types_is_rejected(tmp_path: Path, said: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=r"^`rope_parameters = .*` is not supported") as caught:
        shape_of(completed({"model_type": "gemma3_text", **said}, FAMILIES["gemma3_text"]), tmp_path)
    assert says in str(caught.value.hint)


def test_wrong_base_of_a_layer_type_is_invalid() -> None:
    with pytest.raises(InvalidFieldError, match=r"`rope_parameters\.rope_theta = high` must be a number"):
        completed({"model_type": "gemma3_text", "rope_local_base_freq": "high"}, FAMILIES["gemma3_text"])
    with pytest.raises(InvalidFieldError, match=r"`rope_parameters = \[1\]` must be a table"):
        completed({"model_type": "gemma3_text", "rope_parameters": {"full_attention": [1]}}, FAMILIES["gemma3_text"])
