"""Sizes of a run's roles in processes and devices, and the layouts under which a saved state can be loaded. Light."""

from collections.abc import Mapping
from typing import Any

from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import ParallelTable, Recipe
from ppoctl.rewards.model import ModelScorer

GPUS_PER_NODE = 8
"""GPUs that a node is taken to have, where `plan` has to know."""

OBJECT_STORE_BYTES = 256 * 2**20
"""Least shared memory of a Ray of the run\'s own: rollouts and two buckets of weights pass through it; Ray spills the
rest to disk."""

_FREE = ("context", "data", "sequence")
"""Keys of a layout that may differ from those of a state saved with `reshardable = "dp"`."""


def layouts(recipe: Recipe) -> dict[str, ParallelTable]:
    """The parallel layout of each role. The critic follows the actor unless its table is written."""
    actor = recipe.actor.parallel or ParallelTable()
    return {"actor": actor, "critic": recipe.critic.parallel or actor}


def reward_models(recipe: Recipe) -> dict[KeyPath, ModelScorer]:
    """The reward's tables that have a model, by their keys. Joined by dots a key is the name of the model's role."""
    found = {("reward", *below): scorer for below, scorer in recipe.reward.scorers.items()}
    return {key: scorer for key, scorer in found.items() if isinstance(scorer, ModelScorer)}


def processes(recipe: Recipe) -> dict[str, int]:
    """Processes of each role: actor, critic, generator, and each reward model by its key."""
    sizes = {role: layout.world_size for role, layout in layouts(recipe).items()}
    sizes["generator"] = recipe.generator.engines * recipe.generator.tensor
    for key, table in reward_models(recipe).items():
        sizes[dotted(key)] = (table.parallel or ParallelTable()).world_size
    return sizes


def leaving(recipe: Recipe) -> tuple[str, ...]:
    """Roles that leave shared devices while another one works: what `cluster.offload` lists, each reward model by its
    key."""
    listed = recipe.cluster.offload
    models = tuple(map(dotted, reward_models(recipe))) if "reward" in listed else ()
    return (*(role for role in listed if role != "reward"), *models)


def devices(recipe: Recipe) -> int:
    """GPUs, or slots on CPUs, that all processes take together (`engines.ray.placement`)."""
    sizes = processes(recipe).values()
    return max(sizes) if recipe.cluster.placement == "colocated" else sum(sizes)


def is_one_process(recipe: Recipe) -> bool:
    """Whether the trained roles live in the process of the command, and vLLM beside it, without Ray."""
    return recipe.cluster.placement == "colocated" and set(processes(recipe).values()) == {1}


def saved_layout(recipe: Recipe, role: str) -> dict[str, Any]:
    """The role's parallel table with `reshardable`, `full` or `dp`, as a saved state records it."""
    table = layouts(recipe)[role]
    kind = recipe.checkpoint.reshardable if table.distributed_optimizer else "full"
    return {**table.model_dump(mode="json"), "reshardable": kind}


def what_differs(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Keys of the layout that keep a saved state from being loaded; empty: it can be."""
    bound = {"distributed_optimizer"}
    if saved["reshardable"] == "dp":
        bound = set(saved) - {"reshardable", *_FREE}
    return sorted(key for key in bound if saved[key] != asked[key])
