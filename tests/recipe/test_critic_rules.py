"""Rules about the critic: it is there if and only if the advantages train it."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from ppoctl.algorithms.estimators.monte_carlo import MonteCarloAdvantages
from ppoctl.core.finding import Finding
from ppoctl.recipe.loading.load import examine, load
from ppoctl.recipe.loading.rules import critic_rules
from ppoctl.recipe.loading.rules.all_rules import rules_of, violations
from ppoctl.recipe.schema import Recipe
from recipe.conftest import SMALLEST, Write, refusal

NO_CRITIC = SMALLEST[: SMALLEST.index("[critic.optimizer]")]
TRAINS_NONE = "the advantages train no critic"
KIND = '`ppo.advantages.kind` = `"monte_carlo"` (--set)'


class AdvantagesWithoutCritic(MonteCarloAdvantages):
    """Advantages that train no critic."""

    trains_critic: ClassVar[bool] = False


def without_critic(file: Path, *sets: str) -> Recipe:
    """Return the recipe with advantages that train no critic. The rules are not checked."""
    loaded, problems = examine([file], sets, {}, judges=())
    assert loaded is not None
    assert not problems
    ppo = loaded.recipe.ppo.model_copy(update={"advantages": AdvantagesWithoutCritic(kind="monte_carlo")})
    return loaded.recipe.model_copy(update={"ppo": ppo})


def problems_of(recipe: Recipe) -> list[Finding]:
    return violations(recipe, lambda key: "--set")


# Settings on top of a recipe without [critic] and with advantages that train none; message; hint.
CASES: list[tuple[list[str], str, str]] = [
    (
        ["ppo.critic_epochs=2"],
        f"`ppo.critic_epochs` has no effect, because {TRAINS_NONE}: `ppo.critic_epochs` = `2` (--set), {KIND}",
        "remove `ppo.critic_epochs`, or add `--set ppo.advantages.kind=gae`",
    ),
    (
        ["ppo.critic_minibatch_seqs=2"],
        f"`ppo.critic_minibatch_seqs` has no effect, because {TRAINS_NONE}: `ppo.critic_minibatch_seqs` = `2` "
        f"(--set), {KIND}",
        "remove `ppo.critic_minibatch_seqs`, or add `--set ppo.advantages.kind=gae`",
    ),
    (
        ["ppo.critic_only_steps=1"],
        f"`ppo.critic_only_steps` has no effect, because {TRAINS_NONE}: `ppo.critic_only_steps` = `1` (--set), "
        f"{KIND}",
        "remove `ppo.critic_only_steps`, or add `--set ppo.advantages.kind=gae`",
    ),
    (
        ["ppo.critic_only_until={explained_variance=0.5, at_most=3}"],
        f"`ppo.critic_only_until` has no effect, because {TRAINS_NONE}: `ppo.critic_only_until.explained_variance` = "
        f"`0.5` (--set), `ppo.critic_only_until.at_most` = `3` (--set), {KIND}",
        "remove `ppo.critic_only_until.explained_variance` and `ppo.critic_only_until.at_most`, or add "
        "`--set ppo.advantages.kind=gae`",
    ),
    (
        ["ppo.value_loss={clip=0.3, scale=2.0}"],
        f"`ppo.value_loss` has no effect, because {TRAINS_NONE}: `ppo.value_loss.clip` = `0.3` (--set), "
        f"`ppo.value_loss.scale` = `2.0` (--set), {KIND}",
        "remove `ppo.value_loss.clip` and `ppo.value_loss.scale`, or add `--set ppo.advantages.kind=gae`",
    ),
    (
        ["model.critic=org/judge"],
        f'`model.critic` has no effect, because {TRAINS_NONE}: `model.critic.path` = `"org/judge"` (--set), {KIND}',
        "remove `model.critic.path`, or add `--set ppo.advantages.kind=gae`",
    ),
    (
        ["health.explained_variance.min=0.5"],
        f"`health.explained_variance` has no effect, because {TRAINS_NONE}: `health.explained_variance.min` = `0.5` "
        f"(--set), {KIND}",
        "remove `health.explained_variance.min`, or add `--set ppo.advantages.kind=gae`",
    ),
    (
        ["ppo.truncated=bootstrap"],
        f'a bootstrap value is the critic\'s, but {TRAINS_NONE}: `ppo.truncated` = `"bootstrap"` (--set), {KIND}',
        "change the recipe, or add `--set ppo.truncated=terminal`",
    ),
    (
        ["cluster.offload=['actor', 'critic']"],
        "there is no critic to offload, because the advantages train none: `cluster.offload` = "
        f'`["actor", "critic"]` (--set), {KIND}',
        "change the recipe, or add `--set 'cluster.offload=[\"actor\"]'`",
    ),
]


@pytest.mark.parametrize(("sets", "message", "hint"), CASES, ids=[sets[0].partition("=")[0] for sets, _, _ in CASES])
def test_key_of_a_critic_is_refused_without_a_critic(write: Write, sets: list[str], message: str, hint: str) -> None:
    file = write(NO_CRITIC)
    assert problems_of(without_critic(file)) == []
    [problem] = problems_of(without_critic(file, *sets))
    assert (problem.what, problem.hint) == (message, hint)


def test_values_that_are_the_defaults_are_accepted_without_a_critic(write: Write) -> None:
    sets = ["ppo.critic_only_steps=0", "health.explained_variance.min=-1.0", "ppo.truncated=filter"]
    assert problems_of(without_critic(write(NO_CRITIC), *sets, "cluster.offload=['generator']")) == []


@pytest.mark.parametrize(
    ("sets", "message", "hint"),
    [
        (
            ["ppo.critic_only_until={explained_variance=0.5, at_most=10}"],
            "--set: the actor may never train: the critic may train alone for 10 of 10 steps: "
            "`ppo.critic_only_until.at_most` = `10` (--set), `steps` = `10` (r.toml:2)",
            "change the recipe, or add `--set ppo.critic_only_until.at_most=1`",
        ),
        (
            ["ppo.critic_only_until={explained_variance=0.5, at_most=9}", "ppo.critic_only_steps=1"],
            "--set: the steps that train only the critic are set both as a number and by a condition: "
            "`ppo.critic_only_steps` = `1` (--set), `ppo.critic_only_until.at_most` = `9` (--set)",
            "change the recipe, or add `--set ppo.critic_only_steps=0`",
        ),
    ],
)
def test_critic_warmup_that_contradicts_other_keys_is_refused(
    smallest: Path, sets: list[str], message: str, hint: str
) -> None:
    caught = refusal([smallest], sets, {})
    assert (caught.message, caught.hint) == (message, hint)
    load([smallest], ["ppo.critic_only_until={explained_variance=0.5, at_most=9}"], {})


@pytest.mark.parametrize("kind", ["gae", "monte_carlo"])
def test_missing_critic_is_refused_if_the_advantages_train_one(write: Write, kind: str) -> None:
    """The keys of a critic are then not reported: the table is what is missing."""
    caught = refusal([write(NO_CRITIC)], [f"ppo.advantages.kind={kind}", "ppo.critic_epochs=2"], {})
    assert caught.message == (
        "--set: missing table [critic], which the advantages train; it needs `critic.optimizer.lr`: "
        f'`ppo.advantages.kind` = `"{kind}"` (--set)'
    )
    assert caught.hint == "change the recipe, or add `--set critic.optimizer.lr=1e-5`"
    loaded = load([write(NO_CRITIC)], ["critic.optimizer.lr=1e-5"], {})
    assert loaded.recipe == load([write(SMALLEST)], (), {}).recipe


def test_critic_is_refused_if_the_advantages_train_none(smallest: Path) -> None:
    [problem] = problems_of(without_critic(smallest))
    assert problem.what == (
        f"[critic] has no effect, because {TRAINS_NONE}: `critic.optimizer.lr` = `1e-05` (--set), {KIND}"
    )
    assert problem.hint == "remove the table [critic], or add `--set ppo.advantages.kind=gae`"


@pytest.mark.parametrize("rule", rules_of(critic_rules), ids=lambda rule: rule.__name__)
def test_rule_accepts_ppo_with_every_key_of_a_critic(smallest: Path, rule: Any) -> None:
    # Only one of the two keys of a critic warm-up may be set.
    sets = [setting for settings, _, _ in CASES for setting in settings if "critic_only_steps" not in setting]
    assert list(rule(load([smallest], sets, {}).recipe)) == []
