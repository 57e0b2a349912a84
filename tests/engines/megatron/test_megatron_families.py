"""A Hugging Face configuration is honoured field by field, or refused by name."""

import json
from pathlib import Path

import megatron_lab as lab
import pytest
import torch

from ppoctl.engines.megatron.families import model_folder, read_shape
from ppoctl.errors import EnvironmentProblemError, RecipeError
from ppoctl.recipe.schema import ParallelTable


def edited(folder: Path, target: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_a_qwen2_configuration_is_read(model):
    shape = read_shape(model("qwen2-tied"))
    assert (shape.family, shape.qkv_bias, shape.tied_embeddings) == ("qwen2", True, True)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (6, 2, 8)
    assert (shape.vocab_size, shape.hidden_size, shape.ffn_hidden_size) == (101, 48, 80)
    assert (shape.norm_eps, shape.rope_theta, shape.llama3_rope_factor) == (1e-5, 10000.0, None)


def test_a_llama3_configuration_is_read(model):
    shape = read_shape(model("llama3-rope"))
    assert (shape.family, shape.qkv_bias, shape.tied_embeddings) == ("llama", False, False)
    assert (shape.head_dim, shape.rope_theta, shape.llama3_rope_factor) == (16, 500000.0, 32.0)


def test_older_files_with_rope_settings_of_their_own_are_read(model, tmp_path):
    config = json.loads((model("qwen2") / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 1e6, "torch_dtype": "bfloat16"}))
    assert read_shape(tmp_path).rope_theta == 1e6


PUBLISHED = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_of_transformers_4_are_read(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    shape = read_shape(tmp_path)
    if "Llama" in name:
        assert (shape.head_dim, shape.rope_theta, shape.llama3_rope_factor) == (64, 500000.0, 32.0)
    else:
        assert (shape.head_dim, shape.rope_theta, shape.llama3_rope_factor) == (128, 10000.0, None)


def test_weights_and_activations_have_the_recipes_dtype_and_there_is_no_dropout(model):
    config = read_shape(model("qwen2")).transformer_config(torch.bfloat16, ParallelTable())
    assert (config.params_dtype, config.bf16) == (torch.bfloat16, True)
    assert (config.attention_dropout, config.hidden_dropout) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("qwen2", "hidden_act", "gelu"),
        ("qwen2", "attention_dropout", 0.1),
        ("qwen2", "dual_chunk_attention_config", {"chunk_size": 8}),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        ("llama", "rope_parameters", {**lab.LLAMA3_ROPE, "low_freq_factor": 2.0}),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ],
)
def test_what_is_not_computed_is_refused_by_name(model, tmp_path, kind, field, value):
    with pytest.raises(RecipeError, match=f"^`{field} = .*not supported"):
        read_shape(edited(model(kind), tmp_path, **{field: value}))


def test_a_sliding_window_is_refused(model, tmp_path):
    folder = edited(
        model("qwen2"), tmp_path, use_sliding_window=True, sliding_window=16, max_window_layers=0, layer_types=None
    )
    with pytest.raises(RecipeError, match=r"^`use_sliding_window = True` is not supported"):
        read_shape(folder)


def test_another_family_is_refused_with_those_that_work(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(RecipeError, match="model family `gpt2`") as caught:
        read_shape(tmp_path)
    assert caught.value.hint == "choose a model of llama, qwen2, qwen3, qwen3_moe"


def test_a_missing_model_is_an_environment_problem(tmp_path):
    with pytest.raises(EnvironmentProblemError, match="does not exist"):
        model_folder(str(tmp_path / "nowhere"))
    with pytest.raises(EnvironmentProblemError, match=r"no `config\.json`"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EnvironmentProblemError, match="cannot be read"):
        read_shape(tmp_path)


def test_a_hub_id_without_network_or_cache_is_an_environment_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentProblemError, match="neither a folder nor available from the hub"):
        model_folder("nobody/nothing")
