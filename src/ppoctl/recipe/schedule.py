"""How many optimizer steps a run has, and the learning rate of each; the arithmetic of `ppo.schedule` without torch.

A test holds the two together.
"""

import math

from ppoctl.recipe.schema import OptimizerTable, Recipe


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


def learning_rate(update: int, optimizer: OptimizerTable, *, planned: int) -> float:
    """The learning rate of one update; updates count from 0. See `ppo.schedule.learning_rate`."""
    warmup = optimizer.lr_warmup_updates
    if update < warmup:
        return optimizer.lr * (update + 1) / warmup
    if optimizer.lr_schedule == "constant":
        return optimizer.lr
    total = optimizer.lr_decay_updates or planned
    progress = min(1.0, (update - warmup) / max(total - warmup, 1))
    remaining = 1.0 - progress if optimizer.lr_schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return optimizer.lr * (optimizer.lr_min_frac + (1.0 - optimizer.lr_min_frac) * remaining)
