"""The settings of bundled recipes that determine their speed on a GPU, and a check with `plan` that each fits."""

from pathlib import Path

import pytest

from ppoctl.algorithms.role_table import ByTokens
from ppoctl.plan.memory.estimate import Memory, estimate_here, misfit
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
MOST_BUCKETS = {
    "own/gemma-3-1b-24g": 4,
    "own/llama-3.2-1b-24g": 5,
    "own/llama-3.2-1b-80g": 5,
    "own/llama-3.2-1b-hh-rlhf-80g": 5,
    "own/qwen3-0.6b-24g": 3,
    "own/qwen3-0.6b-80g": 3,
    "own/qwen3-0.6b-grpo-80g": 3,
    "own/qwen3-4b-80g": 17,
    "own/qwen3-4b-code-80g": 17,
    "nemo-rl/ppo_math_1B_megatron": 7,
    "nemo-rl/ppo-qwen2.5-1.5b-gsm8k-1n8g-megatron": 7,
    "dsr1-7b": 31,
}
"""Buckets in one weight transfer: half a GiB each, and a larger embedding alone. Each bucket costs a round trip."""


def planned(name: str, gpu_gib: float) -> tuple[Recipe, Memory]:
    recipe = load([RECIPES / f"{name}.toml"], (), {"PPOCTL_DATA": "/data"}).recipe
    memory = estimate_here(recipe, gpu_gib)
    assert memory is not None
    return recipe, memory


@pytest.mark.parametrize(("name", "most"), MOST_BUCKETS.items())
def test_own_recipes_send_weights_in_few_buckets(name: str, most: int) -> None:
    _, memory = planned(name, 22.5 if name.endswith("24g") else 80.0)
    assert len(memory.sending.buckets) <= most
    assert misfit(memory) is None


@pytest.mark.parametrize("name", ["own/qwen3-4b-80g", "own/qwen3-4b-code-80g"])
def test_microbatches_of_4b_recipes_have_8192_tokens(name: str) -> None:
    recipe, memory = planned(name, 79.0)  # memory of an 80 GB card
    for table in (recipe.actor, recipe.critic):
        assert isinstance(table.batching, ByTokens)
        assert table.batching.max_tokens_per_microbatch == 8192
    assert misfit(memory) is None


@pytest.mark.parametrize("name", ["own/qwen3-0.6b-80g", "own/qwen3-0.6b-grpo-80g"])
def test_concurrent_seqs_of_0_6b_recipe_fit_kv_cache(name: str) -> None:
    """Answers to GSM8K have 450 tokens on average, prompts included."""
    recipe, memory = planned(name, 80.0)
    assert recipe.generator.max_concurrent_seqs == 512 < memory.generator.kv_tokens / 450


def test_save_of_64_gpu_recipe_gathers_nothing() -> None:
    _, memory = planned("dsr1-7b", 80.0)
    assert memory.node is not None
    assert not {"gathered for a save", "read by a load"} & {item.name for item in memory.node.items}
