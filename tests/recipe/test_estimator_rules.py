"""Rules about estimators without a critic: what they refuse, in which words, and what they accept."""

from typing import Any

import pytest

from fakes.components import fake_recipe
from ppoctl.loading.rules.across_tables import RULES
from ppoctl.loading.rules.estimators import ESTIMATOR_RULES
from ppoctl.recipe.schema import Recipe

IN_REWARD = {"place": "reward", "coef": 0.1}


def recipe_of(kind: str, samples: int, kl: dict[str, Any]) -> Recipe:
    base = fake_recipe(ppo={"epochs": 2, "minibatch_seqs": 4, "advantages": {"kind": kind}, "kl": kl})
    return base.model_copy(update={"rollout": base.rollout.model_copy(update={"samples_per_prompt": samples})})


@pytest.mark.parametrize(
    ("kind", "samples", "kl", "says", "hint"),
    [
        (
            "grpo",
            1,
            {"place": "none"},
            "a single response to a prompt has no other responses",
            "rollout.samples_per_prompt=8",
        ),
        ("remax", 1, IN_REWARD, "a KL penalty in the reward has no effect: the scores", "ppo.kl.place=loss"),
        ("grpo", 2, IN_REWARD, "a KL penalty in the reward has no effect", "ppo.kl.place=loss"),
    ],
)
def test_relative_advantages_are_refused(kind: str, samples: int, kl: dict[str, Any], says: str, hint: str) -> None:
    recipe = recipe_of(kind, samples, kl)
    (conflict,) = [conflict for rule in ESTIMATOR_RULES for conflict in rule(recipe)]
    assert conflict.message.startswith(says)
    assert conflict.hint == f"--set {hint}"
    assert conflict.keys[0] == ("ppo", "advantages", "kind")


@pytest.mark.parametrize(
    ("kind", "samples", "kl"),
    [
        ("grpo", 2, {"place": "none"}),
        ("grpo", 2, {"place": "loss", "coef": 0.1}),
        ("remax", 1, {"place": "loss", "coef": 0.1}),
        ("raw_reward", 1, IN_REWARD),
        ("monte_carlo", 1, IN_REWARD),
        ("gae", 1, IN_REWARD),
    ],
)
def test_other_recipes_are_accepted(kind: str, samples: int, kl: dict[str, Any]) -> None:
    recipe = recipe_of(kind, samples, kl)
    assert [conflict for rule in ESTIMATOR_RULES for conflict in rule(recipe)] == []


def test_rules_are_checked_with_all_others() -> None:
    assert set(ESTIMATOR_RULES) <= set(RULES)
