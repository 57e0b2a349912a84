"""Estimated bytes of a run on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from ppoctl.model.cost import count_parameters
from ppoctl.plan.memory.driver import batch_of, records_of
from ppoctl.plan.memory.trainer import state_bytes
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.roles import head_of
from ppoctl.recipe.schema import Recipe
from ppoctl.store.retention import LEAST_KEPT


@dataclass(frozen=True)
class StoragePlan:
    """Files of a run on disk. Bytes are estimates; None: the model is not a local folder of a known family."""

    saves: int
    keep_last: int | None
    """Number of checkpoints that are kept; None: all."""
    records_bytes: int
    """Bytes that the stages of one step commit, if all responses have full length."""
    records_kept_bytes: int
    """Bytes of the records of steps after a kept checkpoint. Rollouts that are kept for users are not included."""
    parameters: int | None = None
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of one saved state, by role."""
    states_bytes: int | None = None
    """Bytes of the kept checkpoints, one checkpoint that is being written, one checkpoint that a stop writes, and the
    weights of the best actors, with one further actor while a best actor is replaced."""


def storage_of(recipe: Recipe) -> StoragePlan:
    """Return the files that the run will have on disk, computed from its recipe."""
    every, keep = recipe.checkpoint.every_steps, recipe.checkpoint.keep_last
    saves, records = ceil(recipe.steps / every), sum(records_of(batch_of(recipe)).values())
    plan = StoragePlan(saves, keep, records, records * min(recipe.steps, (keep or LEAST_KEPT) * every))
    models = {role: model_of(recipe, role) for role in layouts(recipe)}
    shapes = {role: shape for role, model in models.items() if (shape := model.shape) is not None}
    if shapes.keys() != models.keys():
        return plan
    states = {
        role: state_bytes(shapes[role], head_of(role), layout, models[role].weight_bytes)
        for role, layout in layouts(recipe).items()
    }
    parameters = count_parameters(shapes["actor"])
    best = min(recipe.checkpoint.best_keep, recipe.steps) + 1 if recipe.checkpoint.best else 0
    checkpoints = min(saves, keep or saves) + 2
    return replace(
        plan,
        parameters=parameters,
        state_bytes=states,
        states_bytes=checkpoints * sum(states.values()) + best * parameters * models["actor"].weight_bytes,
    )
