"""Estimated bytes that a run will have on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from ppoctl.model.cost import count_parameters
from ppoctl.plan.memory.driver import batch_of, records_of
from ppoctl.plan.memory.trainer import state_bytes
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import Recipe
from ppoctl.store.retention import LEAST_KEPT


@dataclass(frozen=True)
class StoragePlan:
    """Files of a run on disk. Bytes are estimates, None for a model that is not a local folder of a known family."""

    saves: int
    keep_last: int | None
    """Pairs of states that are kept; None: all."""
    records_bytes: int
    """Bytes that the stages of one step commit, all responses of full length."""
    records_kept_bytes: int
    """Bytes of the records of steps that a kept pair may go on from; rollouts that stay readable come on top."""
    parameters: int | None = None
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of one saved state, by role."""
    states_bytes: int | None = None
    """Bytes of the kept pairs of states, of one while it is written, of one that a stop leaves, and of the weights of
    the best actors, with one more while these are replaced."""


def storage_of(recipe: Recipe) -> StoragePlan:
    """Files that the run will have on disk, from its recipe alone."""
    every, keep = recipe.checkpoint.every_steps, recipe.checkpoint.keep_last
    saves, records = ceil(recipe.steps / every), sum(records_of(batch_of(recipe)).values())
    found = StoragePlan(saves, keep, records, records * min(recipe.steps, (keep or LEAST_KEPT) * every))
    models = {role: model_of(recipe, role) for role in layouts(recipe)}
    shapes = {role: shape for role, model in models.items() if (shape := model.shape) is not None}
    if shapes.keys() != models.keys():
        return found
    states = {
        role: state_bytes(shapes[role], role, layout, models[role].weight_bytes)
        for role, layout in layouts(recipe).items()
    }
    parameters = count_parameters(shapes["actor"])
    best = min(recipe.checkpoint.best_keep, recipe.steps) + 1 if recipe.checkpoint.best else 0
    pairs = min(saves, keep or saves) + 2
    return replace(
        found,
        parameters=parameters,
        state_bytes=states,
        states_bytes=pairs * sum(states.values()) + best * parameters * models["actor"].weight_bytes,
    )
