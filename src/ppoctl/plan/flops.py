"""The arithmetic of a step in FLOPs, which a model's numbers tell. How many of them a machine does in a second only a
run tells, so that no seconds are made of them here."""

from dataclasses import dataclass

from ppoctl.model.cost import forward_flops
from ppoctl.plan.memory.driver import batch_of
from ppoctl.recipe import sizes
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class WorkPlan:
    """FLOPs of one PPO step whose prompts and responses are all of full length: an upper bound. Not counted:
    everything elementwise, what is computed again in a backward pass, reward models, evaluations."""

    drawing: float
    forwards: float
    """Passes without a gradient: values, log-probs, the reference."""
    updates: float
    """Forward and backward passes of actor and critic, over all epochs."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.drawing + self.forwards + self.updates


def work_of(recipe: Recipe) -> WorkPlan | None:
    """The work of a step; None where no folder or shipped config.json says what the models are."""
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
        # A backward pass is twice a forward one.
        updates=3 * (sizes.epochs(recipe, "actor") * of_actor + sizes.epochs(recipe, "critic") * of_critic),
    )
