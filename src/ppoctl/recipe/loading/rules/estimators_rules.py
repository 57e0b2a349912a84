"""Rules about advantage estimators without a critic. See `all_rules`."""

from collections.abc import Iterator

from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.shaping_tables import RewardShaping

_KIND: KeyPath = ("ppo", "advantages", "kind")


def check_group_has_several_samples(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.advantages.compares_groups and recipe.rollout.samples_per_prompt == 1:
        yield conflict(
            "a single response to a prompt has no other responses to be compared with, so all advantages are 0",
            (_KIND, ("rollout", "samples_per_prompt")),
            "--set rollout.samples_per_prompt=8",
        )


def check_penalty_is_read(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.ppo.advantages.reads_token_rewards and recipe.ppo.kl.place == "reward":
        yield conflict(
            "a KL penalty in the reward has no effect: the advantages are computed from scores without the penalty",
            (_KIND, ("ppo", "kl", "place")),
            "--set ppo.kl.place=loss",
        )


def check_whitened_rewards_are_read(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.ppo.advantages.reads_token_rewards and recipe.ppo.whiten_rewards:
        yield conflict(
            "whitened rewards of tokens have no effect: the advantages are computed from scores of responses",
            (("ppo", "whiten_rewards"), _KIND),
            "--set ppo.whiten_rewards=false",
        )


def check_reward_has_components(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.advantages.reads_components and not recipe.reward.component_weights:
        yield conflict(
            "the advantages are computed from the components of a sum, and this reward is not a sum",
            (_KIND, ("reward", "kind")),
            "--set ppo.advantages.kind=grpo",
        )


def check_components_are_not_shaped(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.ppo.advantages.reads_components:
        return
    for key, field in RewardShaping.model_fields.items():
        if getattr(recipe.reward, key) != field.default:
            yield conflict(
                f"`reward.{key}` has no effect: the advantages are computed from the components of the sum, before "
                "reward shaping",
                (_KIND, ("reward", key)),
                "--set ppo.advantages.kind=grpo",
            )
