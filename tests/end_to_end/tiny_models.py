"""Tiny models of every family, with the quickstart's tokenizer: stand-ins for published ones."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from end_to_end.real_drill import ROOT

LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64}
# vLLM requires these fields before it loads the bias.
ROUTING = {"first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, object]] = {
    "deepseek_v3": {**LATENT, **GROUPS, **ROUTING},
    "gemma2": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    "llama": {},
    "mistral": {"head_dim": 32, "sliding_window": 16},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 96},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32, "norm_topk_prob": True},
}


def tiny_model(kind: str, folder: Path, **changes: object) -> Path:
    """Write a model with random weights, and the quickstart's tokenizer. `changes` are those of its config."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes/quickstart/model")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **{**MODELS[kind], **changes},
    )
    random = AutoModelForCausalLM.from_config(config)
    for name, buffer in random.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2)
    random.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
