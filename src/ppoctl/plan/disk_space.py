"""Estimated bytes of a run on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from ppoctl.algorithms.choose import StepFunctionAt, step_function_at, trace_at
from ppoctl.algorithms.role_model import model_in, model_of
from ppoctl.algorithms.roles import POLICY
from ppoctl.models.cost import count_parameters
from ppoctl.plan.memory.driver import batch_of, records_of
from ppoctl.plan.memory.trainer_memory import state_bytes
from ppoctl.plan.shared_sizes import shapes_of
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import Recipe
from ppoctl.store.retention import LEAST_KEPT


@dataclass(frozen=True)
class StoragePlan:
    """Files of a run on disk. Bytes are estimates; None: the model is not a local folder of a known family."""

    saves: int
    keep_last: int | None
    """Number of checkpoints that are kept; None: all."""
    records_bytes: int
    """Bytes that the stages of one step commit in the maximum number of rounds, if all responses have full length."""
    records_kept_bytes: int
    """Bytes of the records of steps after a kept checkpoint. Rollouts that are kept for users are not included."""
    records_bytes_min: int = 0
    """Bytes that the stages of one step commit in the minimum number of rounds."""
    parameters: int | None = None
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of one saved state, by role."""
    states_bytes: int | None = None
    """Bytes of the kept checkpoints, one checkpoint that is being written, one checkpoint that a stop writes, and the
    weights of the best actors, with one further actor while a best actor is replaced."""


def storage_of(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> StoragePlan:
    """Return the files that the run will have on disk, computed from its recipe."""
    every, keep = recipe.checkpoint.every_steps, recipe.checkpoint.keep_last
    traced = trace_at(recipe, recipe.steps, choose)
    saves, batch = ceil(recipe.steps / every), batch_of(recipe)
    least, most = (sum(records_of(traced, recipe, batch, most=most).values()) for most in (False, True))
    plan = StoragePlan(saves, keep, most, most * min(recipe.steps, (keep or LEAST_KEPT) * every), least)
    shapes = shapes_of(recipe)
    if shapes is None:
        return plan
    states = {
        role: state_bytes(model_in(recipe, role, shape), layouts(recipe)[role], model_of(recipe, role).weight_bytes)
        for role, shape in shapes.items()
    }
    parameters = count_parameters(shapes[POLICY])
    best = min(recipe.checkpoint.best_keep, recipe.steps) + 1 if recipe.checkpoint.best else 0
    checkpoints = min(saves, keep or saves) + 2
    return replace(
        plan,
        parameters=parameters,
        state_bytes=states,
        states_bytes=checkpoints * sum(states.values()) + best * parameters * model_of(recipe, POLICY).weight_bytes,
    )
