"""FLOPs of a step, computed from the shapes of the models.

Seconds are not estimated, because the speed of a machine is known only after a step has run.
"""

from dataclasses import dataclass

from ppoctl.model.cost import forward_flops
from ppoctl.plan.memory.driver import batch_of
from ppoctl.recipe import sizes
from ppoctl.recipe.role_model import model_of
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
    """Forward and backward passes of actor and critic, over all epochs."""

    @property
    def total(self) -> float:
        """FLOPs of the whole step."""
        return self.drawing + self.forwards + self.updates


def work_of(recipe: Recipe) -> WorkPlan | None:
    """Return the FLOPs of a step; None: a model has neither a local folder nor a shipped config.json."""
    actor, critic = model_of(recipe, "actor").shape, model_of(recipe, "critic").shape
    if actor is None or critic is None:
        return None
    batch, ppo = batch_of(recipe), recipe.ppo
    tokens = batch.prompt_tokens + batch.response_tokens
    of_actor = batch.sequences * forward_flops(actor, tokens, actor.vocab_size)
    of_critic = batch.sequences * forward_flops(critic, tokens, 1)
    passes = (ppo.old_logprobs == "trainer") + batch.has_reference
    return WorkPlan(
        drawing=of_actor,
        forwards=passes * of_actor + of_critic,
        # A backward pass costs twice a forward pass.
        updates=3 * (sizes.epochs(recipe, "actor") * of_actor + sizes.epochs(recipe, "critic") * of_critic),
    )
