"""Sizes that follow from several keys of a recipe: sequences and updates of a step, of the run, of a microbatch."""

from ppoctl.model.shape import ModelShape
from ppoctl.recipe.schema import BySequences, ByTokens, OptimizerTable, Recipe, RolloutTable
from ppoctl.rewards.model import USUAL_TOKENS, ModelScorer


def sequences_per_step(recipe: Recipe) -> int:
    """Sequences that one PPO step draws and trains on."""
    return recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt


def epochs(recipe: Recipe, role: str) -> int:
    """Passes of one role over the rollouts of a step."""
    return (recipe.ppo.critic_epochs if role == "critic" else None) or recipe.ppo.epochs


def minibatch_seqs(recipe: Recipe, role: str) -> int:
    """Sequences per optimizer step of one role."""
    return (recipe.ppo.critic_minibatch_seqs if role == "critic" else None) or recipe.ppo.minibatch_seqs


def updates_per_step(recipe: Recipe, role: str) -> int:
    """Optimizer steps of one role in one PPO step."""
    return epochs(recipe, role) * (sequences_per_step(recipe) // minibatch_seqs(recipe, role))


def critic_only_steps(recipe: Recipe, role: str) -> int:
    """PPO steps before the first that trains the role."""
    return recipe.ppo.critic_only_steps if role == "actor" else 0


def planned_updates(recipe: Recipe, role: str) -> int:
    """Optimizer steps of one role in the whole run; the actor rests in critic-only steps."""
    return max(recipe.steps - critic_only_steps(recipe, role), 0) * updates_per_step(recipe, role)


def optimizer_of(recipe: Recipe, role: str) -> OptimizerTable:
    """The optimizer's table of one role."""
    return (recipe.critic if role == "critic" else recipe.actor).optimizer


def updates_per_tick(recipe: Recipe, role: str) -> int:
    """Optimizer steps of one role that have the same learning rate."""
    if optimizer_of(recipe, role).lr_ticks == "update":
        return 1
    return updates_per_step(recipe, role) or 1  # none: a recipe that breaks a rule


def warmup_updates(recipe: Recipe, role: str) -> int:
    """Optimizer steps of one role's warm-up; a share of those planned is a whole number of ticks, the nearest."""
    table, per_tick = optimizer_of(recipe, role), updates_per_tick(recipe, role)
    if table.lr_warmup_frac is None:
        return table.lr_warmup_updates
    return round(table.lr_warmup_frac * (planned_updates(recipe, role) // per_tick)) * per_tick


def reward_tokens(table: ModelScorer, shape: ModelShape) -> int:
    """Most tokens of a text that a reward model reads, and of the texts that it reads at once."""
    return table.max_tokens or min(USUAL_TOKENS, shape.max_positions)


def longest_sequence(recipe: Recipe) -> int:
    """Tokens a forward pass reads at most: the last response token is predicted and never read."""
    return window_tokens(recipe.rollout, recipe.rollout.max_new_tokens) - 1


def window_tokens(rollout: RolloutTable, new_tokens: int) -> int:
    """Most tokens of a prompt and a response of at most so many."""
    window = rollout.max_prompt_tokens + new_tokens
    return window if rollout.max_window_tokens is None else min(window, rollout.max_window_tokens)


def generator_window(recipe: Recipe) -> int:
    """Most tokens of a prompt and its response, in a rollout or an evaluation."""
    return window_tokens(recipe.rollout, max(recipe.rollout.max_new_tokens, recipe.eval.max_new_tokens or 0))


def microbatch_limit(batching: BySequences | ByTokens, *, with_gradient: bool) -> tuple[str, int]:
    """The key that limits a microbatch, and its value: sequences or packed tokens, as `batching` counts.

    A pass without gradient has the `forward_` key where it is written, else the other one.
    """
    names = (
        ("forward_microbatch_seqs", "microbatch_seqs")
        if isinstance(batching, BySequences)
        else ("forward_max_tokens_per_microbatch", "max_tokens_per_microbatch")
    )
    key = names[1] if with_gradient or getattr(batching, names[0]) is None else names[0]
    return key, getattr(batching, key)
