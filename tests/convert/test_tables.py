"""The family tables, compared with transformers' own models: names, shapes, and the position of every element."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ppoctl.models.convert.fused_views import part_of
from ppoctl.models.convert.tensors import Placement, placements, tied_copy, weight_names
from ppoctl.models.convert.transformer_engine import transformer_engine_name
from ppoctl.models.families import FAMILIES
from ppoctl.models.shape_reader import read_shape

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "head_dim": 12,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
DEEPSEEK = {
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
OVERRIDES = {
    "deepseek_v3": DEEPSEEK,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": EXPERTS,
}


@pytest.fixture(params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the configuration of a small model of each family."""
    config = {"model_type": request.param, **SIZES, **OVERRIDES.get(request.param, {})}
    if request.param in ("qwen2", "qwen2_moe"):  # these families derive the width of a head from the hidden size
        del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def on_disk(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that transformers would write; it fuses experts in memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        shape, (layer, kind) = tuple(tensor.shape), name.rsplit(".", 1)
        if not layer.endswith("mlp.experts"):
            shapes[name] = shape
            continue
        for expert in range(shape[0]):
            halved = {"gate_proj": (shape[1] // 2, shape[2]), "up_proj": (shape[1] // 2, shape[2])}
            parts = halved if kind == "gate_up_proj" else {"down_proj": shape[1:]}
            shapes |= {f"{layer}.{expert}.{part}.weight": of for part, of in parts.items()}
    return shapes


def test_tensor_names_and_shapes_equal_transformers(folder: Path) -> None:
    shape = read_shape(folder)
    ours = {placement.name: placement.shape for placement in placements(shape, "token")}
    assert ours == on_disk(folder)
    assert list(ours) == list(weight_names(shape))


def test_every_parameter_element_is_in_exactly_one_tensor(folder: Path) -> None:
    shape = read_shape(folder)
    by_parameter: dict[str, list[Placement]] = {}
    for placement in placements(shape, "token"):
        by_parameter.setdefault(placement.parameter, []).append(placement)
    for parameter, parts in by_parameter.items():
        rows = sum(part.shape[0] for part in parts)
        whole = torch.arange(rows * (torch.Size(parts[0].shape[1:]).numel() or 1)).view(rows, *parts[0].shape[1:])
        numbers = torch.cat([part_of(whole, part.place, shape).reshape(-1) for part in parts])
        assert torch.equal(numbers.sort().values, whole.reshape(-1)), parameter
        for part in parts:
            assert part_of(whole, part.place, shape).numel() == torch.Size(part.shape).numel()


def test_queries_keys_and_values_are_fused_by_group(tmp_path: Path) -> None:
    """Two groups of three query heads with 12 channels: 36 rows of queries, 12 of the key, 12 of the value,
    repeated."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    shape = read_shape(tmp_path)
    rows = torch.arange(120)
    fused = {
        placement.name.split(".")[-2]: part_of(rows, placement.place, shape).reshape(-1).tolist()
        for placement in placements(shape, "token")
        if placement.layer == 0 and "linear_qkv" in placement.parameter
    }
    assert fused["q_proj"] == [*range(36), *range(60, 96)]
    assert fused["k_proj"] == [*range(36, 48), *range(96, 108)]
    assert fused["v_proj"] == [*range(48, 60), *range(108, 120)]


def test_critic_has_a_score_head_and_a_tied_actor_no_lm_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "tie_word_embeddings": True}))
    shape = read_shape(tmp_path)
    assert "lm_head.weight" not in list(weight_names(shape))
    [head] = [placement for placement in placements(shape, "value") if placement.parameter == "output_layer.weight"]
    assert (head.name, head.shape, head.split) == ("score.weight", (1, 48), None)
    copy = tied_copy(shape)
    assert (copy.name, copy.parameter, copy.split) == ("model.embed_tokens.weight", "output_layer.weight", 0)


TRANSFORMER_ENGINE = {
    "qwen2": {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    },
    "gemma2": {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.post_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.post_layernorm.weight",
    },
    "gemma3_text": {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.post_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.post_layernorm.weight",
    },
    "qwen3_moe": {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        *(f"mlp.experts.linear_fc{number}.weight{expert}" for number in (1, 2) for expert in range(3)),
    },
    "deepseek_v3": {
        "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    },
    "qwen2_moe": {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        *(f"mlp.experts.linear_fc{number}.weight{expert}" for number in (1, 2) for expert in range(3)),
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.gate_weight",
    },
}
"""Parameters of a first layer under Transformer Engine's layer spec, as Megatron-Core 0.16 and Megatron-Bridge name
them. Transformer Engine is not installed here."""


@pytest.mark.parametrize("family", TRANSFORMER_ENGINE)
def test_transformer_engine_spec_names_the_same_parameters(tmp_path: Path, family: str) -> None:
    overrides = {**OVERRIDES.get(family, {}), "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **overrides}))
    shape = read_shape(tmp_path)
    names = {
        transformer_engine_name(
            placement.parameter, has_experts=shape.has_experts(0), is_latent=shape.latent is not None
        )
        for placement in placements(shape, "token")
        if placement.layer == 0
    }
    assert names == {f"decoder.layers.0.{name}" for name in TRANSFORMER_ENGINE[family]}


def test_dense_layer_of_a_mixture_fuses_its_norm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **EXPERTS, "model_type": "qwen3_moe"}))
    shape = read_shape(tmp_path)
    names = [
        transformer_engine_name(placement.parameter, has_experts=shape.has_experts(1))
        for placement in placements(shape, "token")
        if placement.layer == 1
    ]
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names
    assert not any("pre_mlp_layernorm" in name for name in names)
