"""Numbers of processes and devices of each role, and the layouts under which a saved state can be loaded.

Imports no torch."""

import math
from collections.abc import Mapping
from typing import Any

from ppoctl.algorithms.role_model import reward_models
from ppoctl.core.key_path import dotted
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.recipe.schema import GeneratorTable, Recipe

GPUS_PER_NODE = 8
"""Number of GPUs per node that `plan` assumes if the recipe does not specify it."""

OBJECT_STORE_BYTES = 256 * 2**20
"""Minimum size of Ray's object store if the run starts Ray. Rollouts and two buckets of weights pass through the
store; Ray writes to disk what exceeds its size."""

_FREE = ("context", "data", "sequence")
"""Keys of a layout that may differ between a state saved with `reshardable = "dp"` and the run that loads it."""


def layouts(recipe: Recipe) -> dict[str, ParallelTable]:
    """Return the parallel layout of each trained role. A role without a table `parallel` has the actor's layout."""
    actor = recipe.actor.parallel or ParallelTable()
    return {role: table.parallel or actor for role, table in recipe.trained.items()}


def layers_of_last_stage(layout: ParallelTable, num_layers: int) -> int:
    """Return the number of layers of the last pipeline stage: with interleaved stages, of the last of them."""
    count = layout.last_stage_layers
    if count is None:
        first = layout.first_stage_layers
        rest = max(1, layout.pipeline - (first is not None))
        count = (num_layers - (first or 0)) // rest
    return count // layout.stages_per_rank


def processes(recipe: Recipe) -> dict[str, int]:
    """Return the number of processes of each role: trained roles, generator, and each reward model by its key."""
    sizes = {role: layout.world_size for role, layout in layouts(recipe).items()}
    sizes["generator"] = engine_count(recipe.generator) * recipe.generator.tensor
    for key, table in reward_models(recipe).items():
        sizes[dotted(key)] = (table.parallel or ParallelTable()).world_size
    return sizes


def engine_count(table: GeneratorTable) -> int:
    """Return the number of engines on all GPUs."""
    return table.engines * table.engines_per_gpu


def per_device(recipe: Recipe, role: str) -> int:
    """Return the number of processes of a role that share a device."""
    return recipe.generator.engines_per_gpu if role == "generator" else 1


def leaving(recipe: Recipe) -> tuple[str, ...]:
    """Return the roles that are offloaded while another role uses their device.

    These are the roles of `cluster.offload`, with `reward` replaced by the key of each reward model.
    """
    listed = recipe.cluster.offload
    models = tuple(map(dotted, reward_models(recipe))) if "reward" in listed else ()
    return (*(role for role in listed if role != "reward"), *models)


def devices(recipe: Recipe) -> int:
    """Return the number of GPUs (without GPUs: slots) that all processes occupy together
    (`engines.ray.placement`)."""
    sizes = [size // per_device(recipe, role) for role, size in processes(recipe).items()]
    return max(sizes) if recipe.cluster.placement == "colocated" else sum(sizes)


def nodes_for(count: int, gpus_per_node: int | None) -> int:
    """Return the number of nodes for `count` devices; 1 without GPUs, since CPU processes share a node."""
    return math.ceil(count / gpus_per_node) if gpus_per_node else 1


def nodes_of(recipe: Recipe) -> int:
    """Return the number of nodes that a Slurm job of the recipe requests. Without `slurm.nodes`, the layout sets
    it."""
    return recipe.slurm.nodes or nodes_for(devices(recipe), recipe.slurm.gpus_per_node)


def is_one_process(recipe: Recipe) -> bool:
    """Whether the run needs no Ray: all trained roles are in the process of the command, and each engine in another
    one."""
    return recipe.cluster.placement == "colocated" and devices(recipe) == 1


def saved_layout(recipe: Recipe, role: str) -> dict[str, Any]:
    """Return the role's parallel table plus `reshardable` (`full` or `dp`), as a saved state records it."""
    table = layouts(recipe)[role]
    kind = recipe.checkpoint.reshardable if table.distributed_optimizer else "full"
    return {**table.model_dump(mode="json"), "reshardable": kind}


def what_differs(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the keys of the layout that prevent a saved state from being loaded; empty: it can be loaded."""
    fixed = {"distributed_optimizer"}
    if saved["reshardable"] == "dp":
        fixed = set(saved) - {"reshardable", *_FREE}
    return sorted(key for key in fixed if saved[key] != wanted[key])
