"""Every field of a Hugging Face configuration is followed, or refused with an error that names it."""

import json
from pathlib import Path

import megatron_lab as lab
import pytest
import torch

from ppoctl.engines.megatron.config import transformer_config
from ppoctl.errors import EnvironmentProblemError, RecipeError
from ppoctl.model.cost import token_cost
from ppoctl.model.families import FAMILIES
from ppoctl.model.folder import model_folder
from ppoctl.model.rope import Llama3Scaling, Rope
from ppoctl.model.shape import ExpertShape
from ppoctl.model.shape_reader import read_shape
from ppoctl.recipe.schema import ParallelTable

PUBLISHED = Path(__file__).parents[3] / "recipes/models"
LLAMA3 = Rope(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))


def edited(folder: Path, target: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_reads_qwen2_config(model):
    shape = read_shape(model("qwen2-tied"))
    assert (shape.family, shape.qkv_bias, shape.tied_embeddings) == ("qwen2", True, True)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (6, 2, 8)
    assert (shape.vocab_size, shape.hidden_size, shape.ffn_hidden_size) == (101, 48, 80)
    assert (shape.norm_eps, shape.rope) == (1e-5, Rope(10000.0))


def test_reads_llama3_config(model):
    shape = read_shape(model("llama3-rope"))
    assert (shape.family, shape.qkv_bias, shape.tied_embeddings) == ("llama", False, False)
    assert (shape.head_dim, shape.rope) == (16, LLAMA3)


def test_reads_mistral_config(model):
    """Version 0.1 has a window in every layer, 0.3 in none; the heads of Nemo are not hidden size / heads."""
    shape = read_shape(model("mistral"))
    assert (shape.family, shape.qkv_bias, shape.tied_embeddings) == ("mistral", False, False)
    assert (shape.windows, shape.head_dim, shape.hidden_size // shape.num_heads) == ((4, 4), 12, 8)
    full = read_shape(model("mistral-full"))
    assert (full.windows, full.head_dim) == ((), 8)


def test_reads_qwen3_config(model):
    shape = read_shape(model("qwen3"))
    assert (shape.family, shape.qkv_bias, shape.qk_norm, shape.head_dim) == ("qwen3", False, True, 12)
    assert shape.experts is None
    assert not read_shape(model("qwen2")).qk_norm


def test_reads_qwen3_moe_config(model):
    assert read_shape(model("qwen3-moe")).experts == ExpertShape(
        count=4, per_token=2, ffn_hidden_size=32, renormalise=True, layers=(True, True, True)
    )


def test_expert_layers_follow_sparse_step_and_mlp_only_list(model):
    """Every second layer, counted from 1, except the last: it is in `mlp_only_layers`."""
    experts = read_shape(model("qwen3-moe-mixed")).experts
    assert experts is not None
    assert (experts.layers, experts.renormalise) == ((False, True, False, False), False)


def test_token_cost_counts_only_routed_experts(model):
    """Per layer 48 x (6 + 6 + 2 + 2) x 12 for attention; three layers 48 x 3 x 80, one 48 x (4 + 2 x 3 x 32)."""
    cost = token_cost(read_shape(model("qwen3-moe-mixed")))
    parameters = 4 * 48 * 192 + 3 * 48 * 240 + 48 * (4 + 192)
    assert cost.flops_per_token == 2 * parameters


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


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""config.json of Qwen/Qwen3-30B-A3B."""
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


def test_reads_published_config_of_many_experts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    shape = read_shape(tmp_path)
    assert (shape.head_dim, shape.rope) == (128, Rope(1000000.0))
    assert shape.experts == ExpertShape(128, 8, 768, renormalise=True, layers=(True,) * 48)


def test_reads_gemma2_config():
    shape = read_shape(PUBLISHED / "google--gemma-2-2b-it")
    assert (shape.embedding_scale, shape.attention_scale) == (48.0, 0.0625)
    assert (shape.attention_softcap, shape.logit_softcap) == (50.0, 30.0)
    assert shape.windows == (4096, None) * 13
    assert (shape.activation, shape.tied_embeddings) == ("gelu_pytorch_tanh", True)
    assert (shape.norm_offset, shape.post_norms, shape.qkv_bias, shape.qk_norm) == (True, True, False, False)


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
