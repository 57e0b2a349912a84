"""Rules about advantage estimators without a critic. See `across_tables`."""

from collections.abc import Iterator

from ppoctl.loading.problems import Conflict, rules_of
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.schema import Recipe

_KIND: KeyPath = ("ppo", "advantages", "kind")


def check_group_has_several_samples(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.ppo.advantages.compares_groups and recipe.rollout.samples_per_prompt == 1:
        yield Conflict(
            "a single response to a prompt has no other responses to be compared with, so all advantages are 0",
            (_KIND, ("rollout", "samples_per_prompt")),
            "--set rollout.samples_per_prompt=8",
        )


def check_group_sees_penalty(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.ppo.advantages.compares_groups and recipe.ppo.kl.place == "reward":
        yield Conflict(
            "a KL penalty in the reward has no effect: the advantages are computed from scores without the penalty",
            (_KIND, ("ppo", "kl", "place")),
            "--set ppo.kl.place=loss",
        )


def check_group_sees_whitened_rewards(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.ppo.advantages.compares_groups and recipe.ppo.whiten_rewards:
        yield Conflict(
            "whitened rewards of tokens have no effect: the advantages are computed from scores of responses",
            (("ppo", "whiten_rewards"), _KIND),
            "--set ppo.whiten_rewards=false",
        )


ESTIMATOR_RULES = rules_of(globals())
