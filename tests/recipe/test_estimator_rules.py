"""Rules about estimators without a critic: what they refuse, in which words, and what they accept."""

from typing import Any

import pytest

from fakes.components import fake_recipe
from ppoctl.recipe.loading.rules import estimators_rules, resampling_rules
from ppoctl.recipe.loading.rules.all_rules import rules_of
from ppoctl.recipe.schema import Recipe

IN_REWARD = {"place": "reward", "coef": 0.1}
COMPARE_GROUPS = ("grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline")
SUM = {"kind": "sum", "parts": {"right": {"kind": "gsm8k"}, "form": {"kind": "format", "pattern": "a+"}}}


def recipe_of(kind: str, samples: int, kl: dict[str, Any]) -> Recipe:
    base = fake_recipe(ppo={"epochs": 2, "minibatch_seqs": 4, "advantages": {"kind": kind}, "kl": kl})
    return base.model_copy(update={"rollout": base.rollout.model_copy(update={"samples_per_prompt": samples})})


@pytest.mark.parametrize(
    ("kind", "samples", "kl", "says", "hint"),
    [
        *(
            (kind, 1, {"place": "none"}, "a single response to a prompt has no other", "rollout.samples_per_prompt=8")
            for kind in COMPARE_GROUPS
        ),
        ("remax", 1, IN_REWARD, "a KL penalty in the reward has no effect", "ppo.kl.place=loss"),
        *(
            (kind, 2, IN_REWARD, "a KL penalty in the reward has no effect", "ppo.kl.place=loss")
            for kind in COMPARE_GROUPS
        ),
    ],
)
def test_relative_advantages_are_refused(kind: str, samples: int, kl: dict[str, Any], says: str, hint: str) -> None:
    recipe = recipe_of(kind, samples, kl)
    (conflict,) = [conflict for rule in rules_of(estimators_rules) for conflict in rule(recipe)]
    assert conflict.what.startswith(says)
    assert conflict.hint == f"--set {hint}"
    assert conflict.keys[0] == ("ppo", "advantages", "kind")


@pytest.mark.parametrize(
    ("reward", "says", "keys"),
    [
        ({"kind": "gsm8k"}, "the advantages are computed from the components of a sum", [("reward", "kind")]),
        ({**SUM, "overlong": {"buffer_tokens": 2}}, "`reward.overlong` has no effect", [("reward", "overlong")]),
        ({**SUM, "moments": {"kind": "running"}}, "`reward.moments` has no effect", [("reward", "moments")]),
        (
            {**SUM, "unfinished_factor": 0.5},
            "`reward.unfinished_factor` has no effect",
            [("reward", "unfinished_factor")],
        ),
        (SUM, "", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gdpo_requires_unshaped_components(reward: dict[str, Any], says: str, keys: list[Any]) -> None:
    ppo = {"epochs": 2, "minibatch_seqs": 4, "advantages": {"kind": "gdpo"}, "kl": {"place": "none"}}
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 6}
    recipe = fake_recipe(ppo=ppo, rollout=rollout, reward=reward)
    found = [conflict for rule in rules_of(estimators_rules) for conflict in rule(recipe)]
    assert [conflict.keys for conflict in found] == [(("ppo", "advantages", "kind"), key) for key in keys]
    assert all(conflict.what.startswith(says) for conflict in found)
    assert {conflict.hint for conflict in found} <= {"--set ppo.advantages.kind=grpo"}


@pytest.mark.parametrize(
    ("kind", "samples", "kl"),
    [
        *((kind, 2, {"place": "none"}) for kind in COMPARE_GROUPS),
        ("grpo", 2, {"place": "loss", "coef": 0.1}),
        ("reinforce_plus_plus", 1, IN_REWARD),
        ("remax", 1, {"place": "loss", "coef": 0.1}),
        ("raw_reward", 1, IN_REWARD),
        ("monte_carlo", 1, IN_REWARD),
        ("gae", 1, IN_REWARD),
    ],
)
def test_other_recipes_are_accepted(kind: str, samples: int, kl: dict[str, Any]) -> None:
    recipe = recipe_of(kind, samples, kl)
    assert [conflict for rule in rules_of(estimators_rules) for conflict in rule(recipe)] == []


def test_whitened_rewards_are_refused_if_no_advantage_depends_on_them() -> None:
    ppo = {"epochs": 2, "minibatch_seqs": 4, "whiten_rewards": True}
    for kind, says in (("grpo", ["whitened rewards of tokens have no effect"]), ("raw_reward", []), ("gae", [])):
        recipe = fake_recipe(ppo={**ppo, "advantages": {"kind": kind}})
        found = [conflict for rule in rules_of(estimators_rules) for conflict in rule(recipe)]
        assert [conflict.what.partition(":")[0] for conflict in found] == says
        assert [conflict.hint for conflict in found] == ["--set ppo.whiten_rewards=false"] * len(says)


@pytest.mark.parametrize(("kind", "refused"), [("grpo", 1), ("raw_reward", 1), ("monte_carlo", 0), ("gae", 0)])
def test_resampling_requires_a_critic(kind: str, refused: int) -> None:
    ppo = {"epochs": 2, "minibatch_seqs": 4, "resample": {"kind": "pow"}, "advantages": {"kind": kind}}
    found = [conflict for rule in rules_of(resampling_rules) for conflict in rule(fake_recipe(ppo=ppo))]
    assert [conflict.hint for conflict in found] == ["--set ppo.resample.kind=none"] * refused
    assert all("only with a critic" in conflict.what for conflict in found)
