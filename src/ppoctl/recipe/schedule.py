"""How many optimizer steps a run has."""

from ppoctl.recipe.schema import Recipe


def updates_per_step(recipe: Recipe, role: str) -> int:
    """Optimizer steps of one role in one PPO step."""
    sequences = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    epochs = recipe.ppo.epochs
    if role == "critic" and recipe.ppo.critic_epochs is not None:
        epochs = recipe.ppo.critic_epochs
    return epochs * (sequences // recipe.ppo.minibatch_seqs)


def planned_updates(recipe: Recipe, role: str) -> int:
    """Optimizer steps of one role in the whole run; the actor rests in critic-only steps."""
    steps = recipe.steps - (recipe.ppo.critic_only_steps if role == "actor" else 0)
    return max(steps, 0) * updates_per_step(recipe, role)
