"""The table of docs/fit.md: what `plan --fit` proposes for bundled recipes.

python tests/plan/fit_page.py        prints the table; PYTHONPATH=src:tests, PPOCTL_DATA=/data
"""

import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from ppoctl.core.key_path import dotted
from ppoctl.plan.fit.proposed import Proposal, Proposals
from ppoctl.plan.fit.search import MARGIN_GIB
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.memory.estimate import estimate_here, misfit
from ppoctl.recipe.loading.load import load
from ppoctl.start.preflight.fitting import proposals_for, settings_of

RECIPES = Path(__file__).parents[2] / "recipes"
CASES = (
    ("own/llama-3.2-1b-80g", 22.5, 1),
    ("own/llama-3.2-1b-80g", 22.5, 2),
    ("nemo-rl/ppo_math_1B_megatron", 47.0, 1),
    ("nemo-rl/ppo-qwen2.5-1.5b-gsm8k-1n8g-megatron", 22.5, 8),
    ("verl/gemma", 47.0, 2),
    ("own/qwen3-4b-80g", 22.5, 1),
    ("own/qwen3-4b-80g", 47.0, 1),
    ("own/qwen3-4b-80g", 79.0, 2),
    ("verl/deepseek7b_llm", 79.0, 1),
    ("verl/deepseek7b_llm", 47.0, 8),
    ("verl/run_qwen3_8b_megatron", 79.0, 1),
    ("verl/run_qwen3_8b_megatron", 79.0, 8),
)
MOVES = {
    "token budgets": ("*.batching.*",),
    "recomputation": ("*.recompute",),
    "offload": ("cluster.offload",),
    "KV cache": ("generator.gpu_memory_frac",),
    "no CUDA graphs": ("generator.compile",),
    "engines": ("generator.engines", "generator.tensor"),
    "layout": ("*.parallel", "cluster.placement", "cluster.weights", "checkpoint.reshardable"),
    "optimizer on the CPU": ("*.optimizer.on",),
    "part that trains": ("*.train",),
}
"""Kind of change, as the page names it -> glob patterns of the dotted keys that it changes."""
HEADER = ("recipe", "GPUs", "1", "2", "3")


def moves_of(keys: Iterable[str]) -> list[str]:
    """Return the kinds of change that these dotted keys belong to, in the order of the page."""
    changed = list(keys)
    return [
        name
        for name, patterns in MOVES.items()
        if any(fnmatchcase(key, pattern) for key in changed for pattern in patterns)
    ]


def row(name: str, gib: float, gpus: int) -> tuple[str, ...]:
    """Return a row of the table. Raises AssertionError if `plan` does not agree with a proposal."""
    recipe = load([RECIPES / f"{name}.toml"])
    proposals = proposals_for(recipe, (), gib, gpus, lambda text: None)
    for each in proposals.found:
        again = load([RECIPES / f"{name}.toml"], settings_of(each.changes)).recipe
        memory = estimate_here(again, gib)
        assert memory is not None
        assert misfit(memory) is None
        assert max(pool.fullest.bytes for pool in memory.places) <= (gib - MARGIN_GIB) * GIB
    cells = [cell(each, proposals) for each in proposals.found]
    return (f"`{name}`", f"{gpus} x {gib:g} GiB", *cells, *["-"] * (3 - len(cells)))


def cell(proposal: Proposal, proposals: Proposals) -> str:
    """Return time, kinds of changes and peak of a proposal."""
    kinds = ", ".join(moves_of(map(dotted, proposal.changes))) or "no change"
    trains = {key[0]: value for key, value in proposal.changes.items() if key[-1] == "train"}
    parts = [f"{role}: {'adapters' if 'lora' in value else 'last layers'}" for role, value in trains.items()]
    peak = max(pool.fullest.bytes for pool in proposal.memory.places) / GIB
    ratio = proposal.seconds.total / proposals.as_it_is.total
    return f"{ratio:.2f} x, {peak:.1f} GiB: {kinds}" + (f" ({', '.join(parts)})" if parts else "")


def line(cells: tuple[str, ...]) -> str:
    """Return the Markdown of a row."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for case in CASES:
        began = time.process_time()
        print(line(row(*case)), f"{time.process_time() - began:.1f} s", flush=True)
