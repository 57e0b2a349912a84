"""docs/partial-training.md shows the memory that `plan` computes, and recipes that load."""

import re
from pathlib import Path

import pytest

from ppoctl.loading.load import load
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.memory.estimate import estimate_here

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "partial-training.md").read_text("utf-8")
SNIPPETS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
TABLE = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
BASE = "own/llama-3.2-1b-32g.toml"
MODELS = {
    "Llama-3.2-1B": "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen3-4B": "Qwen/Qwen3-4B",
    "Qwen3-8B": "Qwen/Qwen3-8B",
}
PARTS = {
    "all layers": (),
    "top 4 layers of the actor": ("actor.train={top_layers=4}",),
    "top 4 layers of actor and critic": ("actor.train={top_layers=4}", "critic.train={top_layers=4}"),
}


def sizes(model: str, *sets: str, has_value_head: bool = False) -> list[str]:
    """Return the cells of a row: the fullest update, states of actor and critic in memory, one checkpoint."""
    words = [f"model.path={model}", *sets]
    recipe = load([ROOT / "recipes" / BASE], words, {"PPOCTL_DATA": "/data"}).recipe
    if has_value_head:
        recipe = recipe.model_copy(update={"critic": load_value_head()})
    memory = estimate_here(recipe, 80.0)
    assert memory is not None
    stages = {stage.stage: stage.bytes for stage in memory.places[0].stages}
    updates = max(size for name, size in stages.items() if name.endswith("_update"))
    resident = sum(role.resident for role in memory.roles.values())
    state = sum(role.state for role in memory.roles.values())
    return [f"{size / GIB:.1f}" for size in (updates, resident, state)]
