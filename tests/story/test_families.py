"""Families train from the command line. The engine of a mixture of experts cannot take weights on a CPU, and is
restarted for a state; others take them in place. (The quickstart is a Qwen2.)"""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ppoctl.recipe.write import recipe_as_toml
from ppoctl.store.journal import read_lines
from ppoctl.store.layout import RunLayout
from story.real_drill import ROOT, real_recipe
from story.typed import Forked

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64}
# What vLLM wants to read before it loads the bias.
ROUTING = {"first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[type[PreTrainedModel], type[PretrainedConfig], dict[str, object]]] = {
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**LATENT, **GROUPS, **ROUTING}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 96}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
}


def tiny_model(kind: str, folder: Path) -> Path:
    """Random weights, with the quickstart's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes/quickstart/model")
    torch.manual_seed(0)
    model, config, sizes = MODELS[kind]
    made = config(
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
        **sizes,
    )
    random = model(made)
    for name, buffer in random.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2)
    random.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def figures(forked: Forked, folder: Path, model: Path, name: str, *sets: str) -> dict[str, float]:
    """Of the second step of two."""
    optimizer = {"optimizer": {"lr": 1e-3}}
    tables = {"model": {"path": str(model), "dtype": "float32"}, "actor": optimizer, "critic": optimizer}
    # No answer of a random model is right: what differs from token to token is the discounted distance to the end.
    reward = {"kind": "gsm8k", "scale": {"from": [0, 1], "to": [-1, 1]}}
    ppo = {"minibatch_seqs": 4, "advantages": {"kind": "gae", "gamma": 0.9, "gae_lambda": 0.9}}
    recipe = real_recipe(every_steps=2, name=name, reward=reward, ppo=ppo, **tables)
    (folder / f"{name}.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
    done = forked(folder, "train", f"{name}.toml", "--set", "steps=2", *sets)
    assert done.returncode == 0, done.stderr
    stages = [line for line in read_lines(RunLayout(folder / "runs" / name).journal) if "stage" in line]
    found = [{k: v for line in stages if line["step"] == step for k, v in line["figures"].items()} for step in (1, 2)]
    assert found[0]["policy/approx_kl"] > 1e-4  # the second step draws from other weights
    return found[1]


# One that is restarted for each state, and one that takes weights in place, are for every day.
IN_THE_STORY = [pytest.param(kind, marks=pytest.mark.story) for kind in ("llama", "qwen2_moe", "qwen3", "qwen3_moe")]


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma2", *IN_THE_STORY])
def test_it_trains_in_one_process(tmp_path: Path, forked: Forked, kind: str) -> None:
    found = figures(forked, tmp_path, tiny_model(kind, tmp_path / "model"), "alone")
    # The engine that drew step 2 held what step 1 trained.
    assert found["mismatch/gap_max_abs"] < 1e-3


@pytest.mark.story
@pytest.mark.minutes(1.5)
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe", "qwen3_moe"])
def test_it_trains_with_experts_on_two_ranks(tmp_path: Path, forked: Forked, kind: str) -> None:
    experts = tiny_model(kind, tmp_path / "model")
    alone = figures(forked, tmp_path, experts, "alone")
    # Who is not at work is on the host: an export must bring back the weights it is made of.
    sets = [
        "actor.parallel={data=2,expert=2}",
        "critic.parallel={data=1}",
        "cluster.offload=['actor', 'critic', 'generator']",
    ]
    layout = [word for key in sets for word in ("--set", key)]
    shared = figures(forked, tmp_path, experts, "shared", *layout)
    assert shared["rollout/response_tokens_mean"] == alone["rollout/response_tokens_mean"]
    assert shared["policy/entropy_mean"] == pytest.approx(alone["policy/entropy_mean"], rel=1e-3)
