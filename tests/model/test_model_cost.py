"""Parameters and FLOPs of published models, and of configurations with omitted fields, without torch."""

import json
from pathlib import Path

import pytest

from ppoctl.models.cost import count_parameters, token_cost
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import shape_if_known

QWEN_0_5B = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL_NEMO = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
    "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072,
    "sliding_window": None,
}  # fmt: skip
QWEN3_0_6B = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
    "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
QWEN_MOE_A2_7B = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "tie_word_embeddings": False,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
GEMMA_2B = {
    "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096,
}  # fmt: skip
GEMMA3_1B = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
}  # fmt: skip
MOONLIGHT = {
    "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 163840, "tie_word_embeddings": False,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_V3 = {
    **MOONLIGHT, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}  # fmt: skip


def model(folder: Path, config: dict[str, object]) -> ModelShape | None:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return shape_if_known(str(folder))


def parameters(folder: Path, config: dict[str, object]) -> int | None:
    shape = model(folder, config)
    return None if shape is None else count_parameters(shape)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (QWEN_0_5B, 494_032_768),
        (LLAMA_8B, 8_030_261_248),
        ({"model_type": "mistral"}, 7_241_732_096),
        (MISTRAL_NEMO, 12_247_782_400),
        (QWEN3_0_6B, 596_049_920),
        (QWEN3_30B_A3B, 30_532_122_624),
        (QWEN_MOE_A2_7B, 14_315_784_192),
        (GEMMA_2B, 2_614_341_888),  # tied, although its config.json does not contain the field
        (GEMMA3_1B, 999_885_952),
        (MOONLIGHT, 15_960_108_544),
        (DEEPSEEK_V3, 671_026_404_352),
    ],
)
def test_parameter_counts_match_published_models(tmp_path: Path, config: dict[str, object], published: int) -> None:
    assert parameters(tmp_path, config) == published


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "x"},
        {**LLAMA_8B, "model_type": "x"},
        {**LLAMA_8B, "num_local_experts": 8},
        {**LLAMA_8B, "vocab_size": "many"},
    ],
)
def test_unsupported_config_gives_no_shape(tmp_path: Path, config: dict[str, object]) -> None:
    assert model(tmp_path, config) is None


@pytest.mark.parametrize(
    ("config", "absent", "taken"),
    [
        (LLAMA_8B, "vocab_size", 32000),
        (MOONLIGHT, "q_lora_rank", 1536),
        (QWEN3_30B_A3B, "num_experts", 128),
        (QWEN_MOE_A2_7B, "shared_expert_intermediate_size", 5632),
        (GEMMA_2B, "head_dim", 256),
        (GEMMA3_1B, "sliding_window_pattern", 6),
    ],
)
def test_omitted_config_keys_take_transformers_defaults(
    tmp_path: Path, config: dict[str, object], absent: str, taken: int
) -> None:
    """The defaults are those that the trainer reads; `test_config` compares them with transformers."""
    without = {key: value for key, value in config.items() if key != absent}
    assert model(tmp_path, without) == model(tmp_path, {**config, absent: taken}) is not None


def test_parameter_count_mixes_dense_and_expert_layers(tmp_path: Path) -> None:
    """Three of four layers have experts: odd numbers, counted from 1, or listed."""
    written = {**QWEN3_30B_A3B, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    shape = model(tmp_path, written)
    assert shape is not None
    assert shape.experts is not None
    assert shape.experts.layers == (False, True, False, False)
    experts, dense = 128 * (3 * 2048 * 768 + 2048), 3 * 2048 * 6144
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 2048 + 2 * 128
    assert count_parameters(shape) == 4 * attention + experts + 3 * dense + 2048 + 2 * 2048 * 151936


def test_reads_num_local_experts_written_by_transformers(tmp_path: Path) -> None:
    written = {**QWEN3_30B_A3B, "num_local_experts": 128}
    del written["num_experts"]
    assert parameters(tmp_path, written) == parameters(tmp_path, QWEN3_30B_A3B)


def test_token_cost_counts_router_and_active_experts(tmp_path: Path) -> None:
    """Includes the router over all experts; a pair of tokens takes two products over 32 heads of 128 channels."""
    shape = model(tmp_path, QWEN3_30B_A3B)
    assert shape is not None
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 8 * 3 * 2048 * 768 + 128 * 2048
    cost = token_cost(shape)
    assert (cost.flops_per_token, cost.flops_per_pair) == (2 * 48 * layer, 4 * 48 * 32 * 128)


def test_token_cost_counts_pairs_inside_of_windows(tmp_path: Path) -> None:
    """Every sixth layer sees all tokens: 4 of 26. A pair takes two products over 4 heads of 256 channels. With 514
    tokens, the last two do not see the first token, and the last one does not see the second."""
    shape = model(tmp_path, GEMMA3_1B)
    assert shape is not None
    cost = token_cost(shape)
    assert (cost.flops_per_pair, cost.flops_in_windows) == (4 * 4 * 1024, ((512, 22 * 4 * 1024),))
    pairs = 514 * 515 // 2
    assert cost.of_sequence(514) - 514 * cost.flops_per_token == 4 * 1024 * (4 * pairs + 22 * (pairs - 3))
    assert token_cost(shape, 24).flops_in_windows == ((512, 2 * 4 * 1024),)
    capped = model(tmp_path, {**GEMMA_2B, "sliding_window": 512})  # computes all pairs
    assert capped is not None
    assert token_cost(capped).flops_in_windows == ()
