"""FLOPs of a step, computed from the shapes of the models.

Seconds are not estimated, because the speed of a machine is known only after a step has run.
"""

from collections import defaultdict
from dataclasses import dataclass

from ppoctl.algorithm.choose import StepFunctionAt, step_function_at, trace_at
from ppoctl.model.cost import forward_flops
from ppoctl.plan.memory.driver import batch_of
from ppoctl.plan.rows import stage_rows
from ppoctl.plan.shapes import shapes_of
from ppoctl.recipe import sizes
from ppoctl.recipe.roles import POLICY, REFERENCE, head_of
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


def work_of(recipe: Recipe, choose: StepFunctionAt = step_function_at, *, most: bool = True) -> WorkPlan | None:
    """Return the FLOPs of the last step, in which all roles train: with the maximum number of rounds or, if `most` is
    false, with the minimum. None: a model has neither a local folder nor a shipped config.json."""
    shapes = shapes_of(recipe)
    if shapes is None:
        return None
    batch, flops = batch_of(recipe), defaultdict[str, float](float)
    tokens = batch.prompt_tokens + batch.response_tokens
    outputs = {role: shape.vocab_size if head_of(role) == "token" else 1 for role, shape in shapes.items()}
    of_row = {role: forward_flops(shape, tokens, outputs[role]) for role, shape in shapes.items()}
    traced = trace_at(recipe, recipe.steps, choose)
    rows = stage_rows(traced, recipe, most=most)
    for stage in traced.stages:
        for each in stage.passes(recipe):
            if each.kind == "score":
                continue
            role = POLICY if each.model == REFERENCE else each.model
            # A backward pass costs twice a forward pass.
            passes = sizes.epochs(recipe, role) * 3 if each.kind == "train" else 1
            of_pass = rows[stage.name].total * of_row[role]
            flops[each.kind] += passes * of_pass
            if each.with_reference:
                flops["forward"] += (passes / 3 if each.kind == "train" else 1) * of_pass
    return WorkPlan(drawing=flops["generate"], forwards=flops["forward"], updates=flops["train"])
