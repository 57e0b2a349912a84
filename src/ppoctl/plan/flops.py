"""FLOPs of a step, computed from the shapes of the models.

Seconds are not estimated, because the speed of a machine is known only after a step has run.
"""

from dataclasses import dataclass

from ppoctl.model.cost import forward_flops
from ppoctl.plan.memory.driver import batch_of
from ppoctl.plan.shapes import shapes_of
from ppoctl.recipe import sizes
from ppoctl.recipe.roles import POLICY, head_of
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


def work_of(recipe: Recipe) -> WorkPlan | None:
    """Return the FLOPs of a step; None: a model has neither a local folder nor a shipped config.json."""
    shapes = shapes_of(recipe)
    if shapes is None:
        return None
    batch, ppo = batch_of(recipe), recipe.ppo
    tokens = batch.prompt_tokens + batch.response_tokens
    outputs = {role: shape.vocab_size if head_of(role) == "token" else 1 for role, shape in shapes.items()}
    each = {role: batch.sequences * forward_flops(shape, tokens, outputs[role]) for role, shape in shapes.items()}
    passes = (ppo.old_logprobs == "trainer") + batch.has_reference
    of_values = sum(flops for role, flops in each.items() if role != POLICY)
    return WorkPlan(
        drawing=each[POLICY],
        forwards=passes * each[POLICY] + of_values,
        # A backward pass costs twice a forward pass.
        updates=3 * sum(sizes.epochs(recipe, role) * flops for role, flops in each.items()),
    )
