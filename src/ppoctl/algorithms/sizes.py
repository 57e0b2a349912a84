"""Numbers derived from several keys of a recipe: sequences and updates per step, per run and per microbatch, and the
schedule of a learning rate."""

from math import ceil

from ppoctl.algorithms.formulas.learning_rate import LearningRate
from ppoctl.algorithms.optimizer_table import OptimizerTable
from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.algorithms.rollout_table import RolloutTable
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.models.shape import ModelShape
from ppoctl.rewards.model_reward import USUAL_TOKENS, ModelScorer


def sequences_per_step(recipe: StepRecipe) -> int:
    """Return the number of sequences that one PPO step trains on; with dynamic sampling, those of the kept groups."""
    return recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt


def sequences_per_round(recipe: StepRecipe) -> int:
    """Return the number of sequences that one round generates; without dynamic sampling, a step has one round."""
    return recipe.rollout.prompts_per_round * recipe.rollout.samples_per_prompt


def segments_per_response(recipe: StepRecipe) -> int:
    """Return the maximum number of steps that generate a response."""
    per_step = recipe.rollout.tokens_per_step
    return 1 if per_step is None else ceil(recipe.rollout.max_new_tokens / per_step)


def fewest_rounds(recipe: StepRecipe) -> int:
    """Return the number of rounds of a step in which every group is kept."""
    return ceil(recipe.rollout.prompts_per_step / recipe.rollout.prompts_per_round)


def most_rounds(recipe: StepRecipe) -> int:
    """Return the maximum number of rounds of a step."""
    return 1 if recipe.rollout.groups is None else recipe.rollout.groups.max_rounds


def sees_all(recipe: StepRecipe, role: str) -> bool:
    """Whether the role trains on every generated sequence, although dynamic sampling drops groups."""
    groups = recipe.rollout.groups
    return head_of(role) == "value" and groups is not None and groups.critic_sees == "all"


def trained_sequences(recipe: StepRecipe, role: str, *, rounds: int | None = None) -> int:
    """Return the number of sequences that one PPO step trains a role on: at most, or after this number of rounds."""
    if not sees_all(recipe, role):
        return sequences_per_step(recipe)
    return (rounds or most_rounds(recipe)) * sequences_per_round(recipe)


def epochs(recipe: StepRecipe, role: str) -> int:
    """Return the number of passes of one role over the rollouts of a step."""
    return (recipe.ppo.critic_epochs if head_of(role) == "value" else None) or recipe.ppo.epochs


def minibatch_seqs(recipe: StepRecipe, role: str) -> int:
    """Return the number of sequences per optimizer step of one role."""
    return (recipe.ppo.critic_minibatch_seqs if head_of(role) == "value" else None) or recipe.ppo.minibatch_seqs


def updates_per_step(recipe: StepRecipe, role: str, *, rounds: int | None = None) -> int:
    """Return the number of optimizer steps of one role in one PPO step: at most, or after this number of rounds."""
    sequences = trained_sequences(recipe, role, rounds=rounds)
    return epochs(recipe, role) * ceil(sequences / minibatch_seqs(recipe, role))


def critic_only_steps(recipe: StepRecipe, role: str) -> int:
    """Return the number of PPO steps before the first step that trains the role."""
    return recipe.ppo.critic_only_steps if role == POLICY else 0


def planned_updates(recipe: StepRecipe, role: str) -> int:
    """Return the maximum number of optimizer steps of one role in the whole run; critic-only steps do not train the
    actor."""
    return max(recipe.steps - critic_only_steps(recipe, role), 0) * updates_per_step(recipe, role)


def fewest_updates(recipe: StepRecipe, role: str) -> int:
    """Return the minimum number of optimizer steps of one role: `critic_only_until` lets the critic train alone as
    long as it may, and dynamic sampling keeps every group. A critic-only step has one round."""
    until, alone = recipe.ppo.critic_only_until, recipe.ppo.critic_only_steps
    per_step = updates_per_step(recipe, role, rounds=fewest_rounds(recipe))
    if role == POLICY:
        return max(recipe.steps - alone - (0 if until is None else until.at_most), 0) * per_step
    return alone * updates_per_step(recipe, role, rounds=1) + (recipe.steps - alone) * per_step


def optimizer_of(recipe: StepRecipe, role: str) -> OptimizerTable:
    """Return the optimizer table of one role."""
    return recipe.trained[role].optimizer


def updates_per_tick(recipe: StepRecipe, role: str) -> int:
    """Return the number of consecutive optimizer steps of one role that have the same learning rate."""
    if optimizer_of(recipe, role).lr_ticks == "update":
        return 1
    return updates_per_step(recipe, role) or 1  # 0 only for an invalid recipe, whose rules are checked later


def warmup_updates(recipe: StepRecipe, role: str) -> int:
    """Return the number of optimizer steps of one role's warm-up; `lr_warmup_frac` is rounded to whole ticks."""
    table, per_tick = optimizer_of(recipe, role), updates_per_tick(recipe, role)
    if table.lr_warmup_frac is None:
        return table.lr_warmup_updates
    return round(table.lr_warmup_frac * (planned_updates(recipe, role) // per_tick)) * per_tick


def learning_rate_of(recipe: StepRecipe, role: str) -> LearningRate:
    """Return the learning rate schedule of a role. Without `lr_decay_updates`, the decay ends with the run."""
    table, per_tick = optimizer_of(recipe, role), updates_per_tick(recipe, role)
    return LearningRate(
        peak=table.lr,
        kind=table.lr_schedule,
        warmup_ticks=warmup_updates(recipe, role) // per_tick,
        total_ticks=(table.lr_decay_updates or planned_updates(recipe, role)) // per_tick,
        min_frac=table.lr_min_frac,
        warmup_init_frac=table.lr_warmup_init_frac,
    )


def reward_tokens(table: ModelScorer, shape: ModelShape) -> int:
    """Return the maximum number of tokens in a text for a reward model; a batch of texts has the same maximum."""
    return table.max_tokens or min(USUAL_TOKENS, shape.max_positions)


def response_tokens(recipe: StepRecipe) -> int:
    """Return the maximum number of tokens of a response, including the observations of an environment."""
    return recipe.rollout.max_new_tokens if recipe.environment is None else recipe.environment.tokens


def eval_response_tokens(recipe: StepRecipe) -> int:
    """Return the maximum number of tokens of a response in an evaluation, including observations."""
    environment = recipe.eval_environment
    new = recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
    return new if environment is None else environment.tokens


def environment_processes(recipe: StepRecipe) -> int:
    """Return the number of processes of environments. Evaluations share those of rollouts if the tables are equal."""
    tables = [recipe.environment, recipe.eval_environment]
    if tables[0] == tables[1]:
        del tables[1]
    return sum(kind.workers for table in tables if table is not None for kind in table.kinds.values())


def longest_sequence(recipe: StepRecipe) -> int:
    """Return the maximum number of tokens of a sequence in a forward pass, which does not read the last response
    token."""
    return window_tokens(recipe.rollout, response_tokens(recipe)) - 1


def window_tokens(rollout: RolloutTable, new_tokens: int) -> int:
    """Return the maximum number of tokens of a prompt together with a response of at most `new_tokens` tokens."""
    window = rollout.max_prompt_tokens + new_tokens
    return window if rollout.max_window_tokens is None else min(window, rollout.max_window_tokens)


def generator_window(recipe: StepRecipe) -> int:
    """Return the maximum number of tokens of a prompt together with its response, in rollouts and evaluations."""
    return window_tokens(recipe.rollout, max(response_tokens(recipe), eval_response_tokens(recipe)))


def microbatch_limit(batching: BySequences | ByTokens, *, with_gradient: bool) -> tuple[str, int]:
    """Return the key that limits a microbatch, and its value in sequences or packed tokens.

    A pass without gradient uses the `forward_` key if it is written, otherwise the other key.
    """
    names = (
        ("forward_microbatch_seqs", "microbatch_seqs")
        if isinstance(batching, BySequences)
        else ("forward_max_tokens_per_microbatch", "max_tokens_per_microbatch")
    )
    key = names[1] if with_gradient or getattr(batching, names[0]) is None else names[0]
    return key, getattr(batching, key)
