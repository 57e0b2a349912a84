"""Every field of a Hugging Face configuration is followed, or refused with an error that names it."""

import json
from pathlib import Path

import megatron_lab as lab
import pytest
import torch

from ppoctl.core.errors import EnvironmentProblemError, RecipeError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.megatron_config import transformer_config
from ppoctl.models.families import FAMILIES
from ppoctl.models.folder import model_folder
from ppoctl.models.rope import Llama3Scaling, Rope
from ppoctl.models.shape import ExpertShape
from ppoctl.models.shape_reader import read_shape

PUBLISHED = Path(__file__).parents[3] / "recipes/models"
LLAMA3 = Rope(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))


def edited(folder: Path, target: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_router_config_has_no_capacity_aux_loss_or_jitter(model):
    """There is no capacity limit, no load-balancing loss and no noise, so a token does not depend on others."""
    config = transformer_config(read_shape(model("qwen3-moe")), torch.float32, ParallelTable())
    assert config.moe_expert_capacity_factor is None
    assert (config.moe_aux_loss_coeff, config.moe_z_loss_coeff, config.moe_input_jitter_eps) == (0.0, None, None)


@pytest.mark.parametrize("table", [ParallelTable(data=2, expert=2), ParallelTable(data=2, expert_tensor=2)])
def test_expert_parallelism_is_rejected_for_dense_model(model, table):
    with pytest.raises(RecipeError, match="a `qwen2` model has no experts to split"):
        transformer_config(read_shape(model("qwen2")), torch.float32, table)


def test_reads_rope_settings_of_older_config_files(model, tmp_path):
    config = json.loads((model("qwen2") / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 1e6, "torch_dtype": "bfloat16"}))
    assert read_shape(tmp_path).rope == Rope(1e6)


READ = {
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B": (128, Rope(10000.0), None),
    "google--gemma-2-2b-it": (256, Rope(10000.0), None),
    "Qwen--Qwen1.5-MoE-A2.7B-Chat": (
        128,
        Rope(1000000.0),
        ExpertShape(
            60, 4, 1408, renormalise=False, layers=(True,) * 24, shared_ffn_hidden_size=5632, shared_gate=True
        ),
    ),
    "deepseek-ai--deepseek-llm-7b-chat": (128, Rope(10000.0), None),
    "NousResearch--Llama-2-7b-hf": (128, Rope(10000.0), None),
    "meta-llama--Llama-3.2-1B-Instruct": (64, LLAMA3, None),
}
"""Folder of a published model -> channels of a head, their rotation, and experts."""


@pytest.mark.parametrize("name", READ)
def test_reads_published_transformers_4_configs(name):
    shape = read_shape(PUBLISHED / name)
    assert (shape.head_dim, shape.rope, shape.experts) == READ[name]


def test_reads_gemma2_config():
    shape = read_shape(PUBLISHED / "google--gemma-2-2b-it")
    assert (shape.embedding_scale, shape.attention_scale) == (48.0, 0.0625)
    assert (shape.attention_softcap, shape.logit_softcap) == (50.0, 30.0)
    assert shape.windows == (4096, None) * 13
    assert (shape.activation, shape.tied_embeddings) == ("gelu_pytorch_tanh", True)
    assert (shape.norm_offset, shape.post_norms, shape.qkv_bias, shape.qk_norm) == (True, True, False, False)


def test_reads_gemma3_config():
    shape = read_shape(PUBLISHED / "google--gemma-3-1b-it")
    assert (shape.embedding_scale, shape.attention_scale) == (1152**0.5, 0.0625)
    assert (shape.attention_softcap, shape.logit_softcap) == (None, None)
    assert shape.windows == (512,) * 5 + (None, 512, 512, 512, 512, 512) * 3 + (None, 512, 512)
    assert (shape.rope, shape.window_rope) == (Rope(1e6), Rope(1e4))
    assert (shape.activation, shape.tied_embeddings) == ("gelu_pytorch_tanh", True)
    assert (shape.norm_offset, shape.post_norms, shape.qkv_bias, shape.qk_norm) == (True, True, False, True)


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("gemma3", {"text_config": {"hidden_size": 8}}, "it has `text_config`, and only models of text"),
        ("qwen3_5_text", {"linear_key_head_dim": 128}, "it has linear attention, whose state"),
    ],
)
def test_model_of_an_unsupported_kind_is_rejected_with_the_reason(tmp_path, family, fields, reason):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **fields}))
    with pytest.raises(RecipeError, match=f"`{family}` is not supported: {reason}"):
        read_shape(tmp_path)


def test_config_uses_recipe_dtype_and_no_dropout(model):
    config = transformer_config(read_shape(model("qwen2")), torch.bfloat16, ParallelTable())
    assert (config.params_dtype, config.bf16) == (torch.bfloat16, True)
    assert (config.attention_dropout, config.hidden_dropout) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("qwen2", "hidden_act", "gelu"),
        ("qwen2", "attention_dropout", 0.1),
        ("qwen2", "dual_chunk_attention_config", {"chunk_size": 8}),
        ("qwen3", "attention_bias", True),
        ("qwen3-moe", "attention_bias", True),
        ("qwen3-moe", "hidden_act", "gelu"),
        ("qwen3-moe", "shared_expert_intermediate_size", 32),
        ("qwen3-moe", "router_jitter_noise", 0.1),
        ("qwen2-moe", "qkv_bias", False),
        ("qwen2-moe", "n_shared_experts", 2),
        ("qwen2-moe", "use_sliding_window", True),
        ("gemma2", "attention_bias", True),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "rope_local_base_freq", 1e4),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "final_logit_softcapping", 30.0),
        ("gemma3", "sliding_window", None),
        ("gemma3", "use_bidirectional_attention", True),
        ("qwen2", "decoder_sparse_step", 1),
        ("mistral", "layer_types", ["full_attention", "sliding_attention"]),
        ("mistral", "attention_bias", True),
        ("mistral", "hidden_act", "gelu"),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ("llama", "rope_parameters", {**lab.LLAMA3_ROPE, "partial_rotary_factor": 0.5}),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ],
)
def test_unsupported_config_field_is_rejected_by_name(model, tmp_path, kind, field, value):
    with pytest.raises(RecipeError, match=f"^`{field} = .*not supported"):
        read_shape(edited(model(kind), tmp_path, **{field: value}))


def test_sliding_window_is_rejected(model, tmp_path):
    folder = edited(
        model("qwen2"), tmp_path, use_sliding_window=True, sliding_window=16, max_window_layers=0, layer_types=None
    )
    with pytest.raises(RecipeError, match=r"^`use_sliding_window = True` is not supported"):
        read_shape(folder)


def test_unknown_family_is_rejected_with_supported_families(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(RecipeError, match="model family `gpt2`") as caught:
        read_shape(tmp_path)
    assert caught.value.hint == f"choose a model of one of these families: {', '.join(sorted(FAMILIES))}"


def test_missing_or_invalid_model_raises_environment_problem(tmp_path):
    with pytest.raises(EnvironmentProblemError, match="does not exist"):
        model_folder(str(tmp_path / "nowhere"))
    with pytest.raises(EnvironmentProblemError, match=r"no `config\.json`"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EnvironmentProblemError, match="is not JSON"):
        read_shape(tmp_path)


def test_unfetched_hub_model_error_names_download_command(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentProblemError, match="`nobody/nothing` has not been fetched") as caught:
        model_folder("nobody/nothing")
    assert caught.value.hint == "hf download nobody/nothing"
