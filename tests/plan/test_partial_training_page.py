"""docs/partial-training.md shows the memory that `plan` computes, for recipes that load."""

import re
from pathlib import Path

import pytest

from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.memory.estimate import estimate_here
from ppoctl.recipe.loading.load import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "partial-training.md").read_text("utf-8")
LAST, SHARED, HEAD, LORA, HOST = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
COLUMNS = {
    "Llama-3.2-1B": "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen3-4B": "Qwen/Qwen3-4B",
    "Qwen3-8B": "Qwen/Qwen3-8B",
}
ROWS: dict[str, tuple[str, ...]] = {
    "all layers train": (),
    "4 layers of the actor": (SHARED,),
    "4 layers of actor and critic": (LAST,),
    "value head on the actor": (HEAD,),
    "value head on the actor, 4 layers": (HEAD, SHARED),
    "LoRA of actor and critic": (LORA,),
    "optimizers on the CPU": (HOST,),
    "optimizers on the CPU, 4 layers of actor and critic": (HOST, LAST),
}
"""Row of the table -> recipes of the page that are given after own/llama-3.2-1b-32g."""


def planned(folder: Path, model: str, recipes: tuple[str, ...]) -> str:
    """Return a cell: memory of the largest update and of the reference on the GPU, one checkpoint, host memory."""
    files = [ROOT / "recipes/own/llama-3.2-1b-32g.toml"]
    for number, text in enumerate(recipes):
        files.append(folder / f"{number}.toml")
        files[-1].write_text(text, "utf-8")
    memory = estimate_here(load(files, [f"model.path={model}"], {"PPOCTL_DATA": "/data"}).recipe, 80.0)
    assert memory is not None
    [gpu] = memory.places
    update = max(stage.bytes for stage in gpu.stages if stage.stage.endswith("_update"))
    checkpoint = sum(role.state for role in memory.roles.values())
    assert memory.node is not None
    sizes = (update, memory.roles["actor"].largest.reference, checkpoint, memory.node.fullest.bytes)
    return " / ".join(f"{size / GIB:.1f}" for size in sizes)


@pytest.mark.parametrize("row", ROWS)
def test_table_equals_plan(tmp_path: Path, row: str) -> None:
    table = {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in PAGE.splitlines()) if cells}
    assert table["GiB"] == list(COLUMNS)
    assert table[row] == [planned(tmp_path, model, ROWS[row]) for model in COLUMNS.values()]
