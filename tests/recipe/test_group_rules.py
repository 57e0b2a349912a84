"""Rules about dynamic sampling: what they refuse, in which words, and what they accept."""

from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.dynamic_sampling import with_groups
from ppoctl.core.finding import Finding
from ppoctl.recipe.loading.rules import groups_rules as groups
from ppoctl.recipe.loading.rules.all_rules import rules_of
from ppoctl.recipe.schema import Recipe

MOMENTS = {"kind": "exact_match", "moments": {"kind": "running"}}
GRPO = {"critic": None, "ppo": {"minibatch_seqs": 2, "advantages": {"kind": "grpo"}}}
COSINE = {"lr": 0.1, "lr_schedule": "cosine"}
ALL = {"critic_sees": "all"}
OVERLAP = {"max_rounds": 3, "overlap_rounds": True}
JUDGE = {"kind": "model", "path": "judge"}


def conflicts(recipe: Recipe) -> list[Finding]:
    return [conflict for rule in rules_of(groups) for conflict in rule(recipe)]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "one response": (
        {},
        {"rollout": {"samples_per_prompt": 1}},
        "[rollout.groups] chooses prompts by the scores of several responses, but each prompt has a single one",
        "rollout.samples_per_prompt",
        "--set rollout.samples_per_prompt=8",
    ),
    "too few prompts": (
        {"round_prompts": 2, "max_rounds": 2},
        {"rollout": {"prompts_per_step": 5}},
        "no step can have enough groups: all rounds together have fewer prompts than a step trains on",
        "rollout.groups.max_rounds",
        "--set rollout.groups.max_rounds=3",
    ),
    "no mean": (
        {"keep": {"min": 0.75, "max": 0.5}},
        {},
        "no mean is at least 0.75 and at most 0.5",
        "rollout.groups.keep.min",
        "",
    ),
    "nothing passes": (
        {"by": "pass"},
        {},
        "no score passes, because `eval.pass_score` is not set",
        "rollout.groups.by",
        "--set eval.pass_score=1",
    ),
    "no components": (
        {"by": "components"},
        {},
        "groups cannot be chosen by components, because this reward is not a sum",
        "rollout.groups.by",
        "--set rollout.groups.by=score",
    ),
    "mean of components": (
        {"by": "components", "keep": {"min": 0.2, "max": 0.8}},
        {"reward": {"kind": "sum", "parts": {"right": {"kind": "exact_match", "weight": 1.0}}}},
        "components have no single mean that could be within bounds",
        "rollout.groups.by",
        "--set rollout.groups.keep=mixed",
    ),
    "moments of the chosen": (
        {"by": "shaped"},
        {"reward": MOMENTS},
        "groups cannot be chosen by rewards that are divided by the moments of the chosen groups",
        "rollout.groups.by",
        "--set rollout.groups.by=score",
    ),
    "other moments": (
        ALL,
        {"reward": MOMENTS},
        "critic and actor would have rewards divided by moments of different responses",
        "rollout.groups.critic_sees",
        "--set rollout.groups.critic_sees=kept",
    ),
    "whitened rewards": (
        ALL,
        {"ppo": {"minibatch_seqs": 2, "whiten_rewards": True}},
        "critic and actor would have rewards divided by the deviations of different responses",
        "rollout.groups.critic_sees",
        "--set rollout.groups.critic_sees=kept",
    ),
    "no critic": (
        ALL,
        GRPO,
        "no critic trains on the dropped groups, because these advantages have no critic",
        "rollout.groups.critic_sees",
        "--set rollout.groups.critic_sees=kept",
    ),
    "fraction of warm-up": (
        ALL,
        {"critic": {"optimizer": {"lr": 0.1, "lr_warmup_frac": 0.1}}},
        "the number of updates of the critic depends on the rounds of a step, so no fraction of it is known",
        "critic.optimizer.lr_warmup_frac",
        "--set critic.optimizer.lr_ticks=step",
    ),
    "one round": (
        {**OVERLAP, "max_rounds": 1},
        {},
        "a step has one round, so no other is generated while it is scored",
        "rollout.groups.overlap_rounds",
        "--set rollout.groups.overlap_rounds=false",
    ),
    "round of the step before": (
        OVERLAP,
        {"rollout": {"ahead": 1}},
        "the engines receive the weights for further rounds only after the first round is scored",
        "rollout.groups.overlap_rounds",
        "--set rollout.groups.overlap_rounds=false",
    ),
    "reward model in turn": (
        OVERLAP,
        {"reward": JUDGE, "cluster": {"offload": ["generator"]}},
        "engines and reward models would work at the same time, and `cluster.offload` lets them work in turn",
        "rollout.groups.overlap_rounds",
        "--set rollout.groups.overlap_rounds=false",
    ),
    "end of a decay": (
        ALL,
        {"critic": {"optimizer": COSINE}},
        "the number of updates of the critic depends on the rounds of a step, so its schedule has no end",
        "critic.optimizer.lr_schedule",
        "--set critic.optimizer.lr_ticks=step",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_recipe_is_refused(name: str) -> None:
    groups, changes, message, key, hint = REFUSED[name]
    (conflict,) = conflicts(with_groups(groups, **changes))
    assert (conflict.what, ".".join(conflict.keys[0]), conflict.hint or "") == (message, key, hint)


@pytest.mark.parametrize(
    ("groups", "changes"),
    [
        ({"by": "pass"}, {"eval": {"pass_score": 0.5}}),
        ({"by": "score"}, {"reward": MOMENTS}),
        ({"round_prompts": 1, "max_rounds": 2}, {}),
        ({"keep": {"min": 0.5, "max": 0.5}}, GRPO),
        ({**ALL, "by": "shaped"}, {"critic": {"optimizer": {**COSINE, "lr_ticks": "step", "lr_warmup_frac": 0.1}}}),
        (ALL, {"critic": {"optimizer": {**COSINE, "lr_decay_updates": 90}}, "actor": {"optimizer": COSINE}}),
    ],
    ids=str,
)
def test_recipe_is_accepted(groups: dict[str, Any], changes: dict[str, Any]) -> None:
    assert conflicts(with_groups(groups, **changes)) == []


def test_recipe_without_dynamic_sampling_is_accepted() -> None:
    rollout = {"prompts_per_step": 8, "samples_per_prompt": 1, "max_prompt_tokens": 4, "max_new_tokens": 6}
    assert conflicts(fake_recipe(rollout=rollout, reward=MOMENTS)) == []
