"""FLOPs of a step, computed from the shapes of the models.

Seconds are not estimated, because the speed of a machine is known only after a step has run.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ppoctl.algorithms.choose import StepFunctionAt, step_function_at, trace_at
from ppoctl.algorithms.kl_use import kl_use
from ppoctl.algorithms.role_model import model_in, shared_layers
from ppoctl.algorithms.roles import REFERENCE
from ppoctl.models.cost import forward_flops
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable import OUTPUT_PARAMETER
from ppoctl.plan.memory.driver import batch_of
from ppoctl.plan.memory.parameter_memory import (
    adapter_parameters,
    layer_parameters,
    trunk_end,
    value_head_parameters,
)
from ppoctl.plan.shared_sizes import shapes_of
from ppoctl.plan.step_work import step_work, uses_of
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class WorkPlan:
    """FLOPs of one PPO step whose prompts and responses all have full length: an upper bound.

    Not counted: elementwise operations, activation recomputation, reward models, evaluations.
    """

    drawing: float
    """Generation of the responses."""
    forwards: float
    """Passes without gradients: values, log-probs, reference."""
    updates: float
    """Forward and backward passes of all trained roles, over all epochs."""

    @property
    def total(self) -> float:
        """FLOPs of the whole step."""
        return self.drawing + self.forwards + self.updates


@dataclass(frozen=True)
class RowWork:
    """FLOPs of the passes of a role over one sequence."""

    forward: float
    added: float
    """Forward pass of a value head on the model, or of adapters, in addition to the model that the generator and the
    reference have; 0: there is neither."""
    top: float
    """Forward pass behind the frozen trunk."""
    update: float
    """Forward and backward pass. The trunk has no backward pass, and frozen matrices have no gradient of the weights,
    which is half of the backward pass of a matrix."""


def work_of(recipe: Recipe, choose: StepFunctionAt = step_function_at, *, most: bool = True) -> WorkPlan | None:
    """Return the FLOPs of the last step, in which all roles train: with the maximum number of rounds or, if `most` is
    false, with the minimum. None: a model has neither a local folder nor a shipped config.json."""
    shapes = shapes_of(recipe)
    if shapes is None:
        return None
    flops = defaultdict[str, float](float)
    for (kind, _), number in pass_flops(recipe, shapes, choose, most=most).items():
        flops[kind] += number
    return WorkPlan(drawing=flops["generate"], forwards=flops["forward"], updates=flops["train"])


def pass_flops(
    recipe: Recipe, shapes: Mapping[str, ModelShape], choose: StepFunctionAt = step_function_at, *, most: bool = True
) -> dict[tuple[str, str], float]:
    """Return (kind of pass, role whose processes compute) -> FLOPs of the last step. The policy computes the
    reference too."""
    flops = defaultdict[tuple[str, str], float](float)
    of_row = {role: full_row_work(recipe, role, shape) for role, shape in shapes.items()}
    # The log-probs of a reference that starts from the actor's model share the pass of the frozen trunk. The full KL
    # runs all layers of both models.
    shares_trunk = shared_layers(recipe) > 0 and kl_use(recipe).is_estimated
    for use in uses_of(step_work(trace_at(recipe, recipe.steps, choose), recipe, most=most), recipe):
        each, work = use.model, of_row[use.model.role]
        if each.kind == "train":
            flops["train", each.role] += use.rows * work.update
        else:
            added = work.added if each.kind == "forward" and each.model != REFERENCE else 0
            flops[each.kind, each.role] += use.rows * (work.forward + added)
        if each.with_reference:
            beside = work.top if shares_trunk and each.kind == "forward" else work.forward
            flops["forward", each.role] += use.rows * beside
    return dict(flops)


def full_row_work(recipe: Recipe, role: str, shape: ModelShape) -> RowWork:
    """Return the FLOPs of a role for a sequence of full length, with outputs at all tokens: an upper bound."""
    batch = batch_of(recipe)
    tokens = batch.prompt_tokens + batch.response_tokens
    return row_work(recipe, role, shape, tokens, tokens)


def row_work(recipe: Recipe, role: str, shape: ModelShape, tokens: int, positions: int) -> RowWork:
    """Return the FLOPs of a role for a sequence of this number of tokens, with outputs at this number of
    positions."""
    model = model_in(recipe, role, shape)
    trunk = trunk_end(model)
    head = 2.0 * positions * (shape.vocab_size if model.head == "token" else 1) * shape.hidden_size
    whole, top = (forward_flops(shape, tokens, 0, first) + head for first in (0, trunk))
    layers = range(trunk, shape.num_layers)
    added = 2.0 * tokens * sum(adapter_parameters(model, layer).of_token for layer in layers)
    if model.value_head is not None:
        width = sum(numbers for _, numbers in value_head_parameters(model))
        added += (
            forward_flops(shape, tokens, 0, shape.num_layers - len(model.copied_layers)) + 2.0 * positions * width
        )
    frozen = sum(layer_parameters(Model(shape, model.head), layer).of_token for layer in layers)
    if model.trainable.lora is None:
        frozen -= sum(layer_parameters(model, layer).of_token for layer in layers)
    # A backward pass costs twice a forward pass; without a gradient of a matrix, half of it.
    update = whole + 2 * top + 3 * added - 2.0 * tokens * frozen
    return RowWork(whole, added, top, update if model.trains(OUTPUT_PARAMETER) else update - head)
