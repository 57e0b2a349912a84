"""Estimated bytes that a run will have on disk."""

from dataclasses import dataclass, field
from math import ceil

from ppoctl.model.cost import count_parameters
from ppoctl.model.reading import shape_if_here
from ppoctl.model.shape import ModelShape
from ppoctl.plan.memory.driver import records_of
from ppoctl.plan.memory.estimate import Memory, batch_of, estimate
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class StoragePlan:
    """Files of a run on disk. Bytes are estimates, None for a model that is not a local folder of a known family."""

    saves: int
    keep_last: int
    parameters: int | None
    actor_state_bytes: int | None
    critic_state_bytes: int | None
    states_bytes: int | None
    """Bytes of the kept pairs of states, of one more while it is written, and of the best actor's weights."""
    records_bytes: int
    """Bytes that the stages of one step commit, all responses of full length."""
    records_kept_bytes: int
    """Bytes of the records of steps that a kept pair may go on from; rollouts that stay readable come on top."""
    gathered_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that each rank gathers from its data and context ranks at a save, by role; roles that gather nothing are
    absent."""


def storage_of(recipe: Recipe) -> StoragePlan:
    """Files that the run will have on disk, from its recipe alone."""
    shape = shape_if_here(recipe.model.path)
    return storage(recipe, shape, None if shape is None else estimate(recipe, shape))


def storage(recipe: Recipe, shape: ModelShape | None, memory: Memory | None) -> StoragePlan:
    """Files that the run will have on disk, given the model and its memory estimate (None where they are not
    known)."""
    every, keep = recipe.checkpoint.every_steps, recipe.checkpoint.keep_last
    saves, records = ceil(recipe.steps / every), records_of(batch_of(recipe)).total
    records_kept = records * min(recipe.steps, keep * every)
    if shape is None or memory is None:
        return StoragePlan(saves, keep, None, None, None, None, records, records_kept)
    weight = 4 if recipe.model.dtype == "float32" else 2
    actor, critic = (memory.roles[role].state for role in ("actor", "critic"))
    kept = min(saves, keep) + 1
    best = count_parameters(shape) * weight if recipe.checkpoint.best else 0
    total = kept * (actor + critic) + best
    gathered = {
        role: memory.roles[role].state // layout.model_ranks
        for role, layout in layouts(recipe).items()
        if layout.distributed_optimizer and layout.data * layout.context > 1
    }
    gathers = gathered if recipe.checkpoint.reshardable == "full" else {}
    return StoragePlan(saves, keep, count_parameters(shape), actor, critic, total, records, records_kept, gathers)
