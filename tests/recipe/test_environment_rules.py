"""Rules about environments: what they refuse, in which words, and what they accept."""

from typing import Any

import pytest

from fakes.components import fake_recipe
from ppoctl.core.finding import Finding
from ppoctl.recipe.loading.rules import environment_rules as environment
from ppoctl.recipe.loading.rules.all_rules import RULES, rules_of
from ppoctl.recipe.schema import Recipe

CLASS = {"kind": "python", "path": "env:Counts"}
TOOLS = {"kind": "tools", "tools": ["calculator"]}
OWN = {"kind": "environment"}
ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 6}
EVEN = {"kind": "exact_match"}
COLUMNS = {"format": "columns", "path": "none", "prompt": "q", "answer": "a", "fields": ["level"]}


def with_environment(environment: dict[str, Any] | None, **changes: Any) -> Recipe:
    """Return a recipe with this environment of at most 3 turns and 10 tokens."""
    table = None if environment is None else {"turns": 3, "tokens": 10, **environment}
    return fake_recipe(**{"environment": table, **changes})


def conflicts(recipe: Recipe) -> list[Finding]:
    return [conflict for rule in rules_of(environment) for conflict in rule(recipe)]


REFUSED: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str, list[str], str | None]] = {
    "turns beyond the tokens": (
        {**CLASS, "turns": 6},
        {},
        "at most 5 turns fit: each has at least one token, and an observation at least one",
        ["environment.turns", "environment.tokens", "rollout.max_new_tokens"],
        "--set environment.turns=5",
    ),
    "turns beyond the generated tokens": (
        {**CLASS, "turns": 7, "tokens": 60},
        {},
        "at most 6 turns fit: each has at least one token, and an observation at least one",
        ["environment.turns", "environment.tokens", "rollout.max_new_tokens"],
        "--set environment.turns=6",
    ),
    "turns beyond the generated tokens of evaluations": (
        CLASS,
        {"eval": {"max_new_tokens": 2}},
        "at most 2 turns fit: each has at least one token, and an observation at least one",
        ["environment.turns", "environment.tokens", "eval.max_new_tokens"],
        "--set environment.turns=2",
    ),
    "turn limit without effect": (
        {**CLASS, "tokens_per_turn": 7},
        {},
        "no turn has more than 6 tokens, so the limit has no effect",
        ["environment.tokens_per_turn", "environment.tokens", "rollout.max_new_tokens"],
        "--set environment.tokens_per_turn=6",
    ),
    "turn limit above all tokens of evaluations": (
        CLASS,
        {"eval": {"environment": {**CLASS, "turns": 3, "tokens": 5, "tokens_per_turn": 6}}},
        "no turn has more than 5 tokens, so the limit has no effect",
        ["eval.environment.tokens_per_turn", "eval.environment.tokens", "rollout.max_new_tokens"],
        "--set eval.environment.tokens_per_turn=5",
    ),
    "limit of generated tokens above all tokens": (
        {**CLASS, "tokens": 5},
        {},
        "an episode has at most 5 tokens, generated and observed, so the limit of generated tokens has no effect",
        ["rollout.max_new_tokens", "environment.tokens"],
        "--set rollout.max_new_tokens=5",
    ),
    "limit of generated tokens of evaluations above all tokens": (
        CLASS,
        {"eval": {"max_new_tokens": 11}},
        "an episode has at most 10 tokens, generated and observed, so the limit of generated tokens has no effect",
        ["eval.max_new_tokens", "environment.tokens"],
        "--set eval.max_new_tokens=10",
    ),
    "minimum length above a turn": (
        {**CLASS, "tokens_per_turn": 3},
        {"rollout": {**ROLLOUT, "min_new_tokens": 4}},
        "the first turn cannot reach the minimum response length",
        ["rollout.min_new_tokens", "environment.tokens_per_turn"],
        None,
    ),
    "tools of one turn": (
        {**TOOLS, "turns": 1},
        {},
        "the actor never reads the result of a tool: an episode ends after one turn",
        ["environment.turns", "environment.kind"],
        "--set environment.turns=4",
    ),
    "no environment to leave out": (
        None,
        {"eval": {"environment": {"kind": "none"}}},
        "responses of evaluations have one turn anyway, because there is no [environment]",
        ["eval.environment.kind"],
        "remove [eval.environment]",
    ),
    "reward of no environment": (
        None,
        {"reward": {"kind": "sum", "parts": {"own": OWN, "even": EVEN}}},
        "the score is the reward of an environment, but the recipe has none",
        ["reward.parts.own.kind", "environment"],
        "ppoctl recipes keys environment",
    ),
    "reward of no environment in evaluations": (
        CLASS,
        {"reward": {"kind": "choose", "cases": {"a": OWN}}, "eval": {"environment": {"kind": "none"}}},
        "the score is the reward of an environment, but evaluations have none",
        ["reward.cases.a.kind", "eval.environment.kind"],
        "remove [eval.environment]",
    ),
    "reward of tools": (
        {"kind": "choose", "cases": {"a": TOOLS}, "field": "level"},
        {"reward": OWN, "data": {"train": COLUMNS}},
        "tools return no reward, so this score is always 0: score the answer with another kind",
        ["reward.kind", "environment.kind"],
        "ppoctl recipes keys reward",
    ),
    "reward model of a text": (
        CLASS,
        {"reward": {"kind": "model", "path": "org/judge", "template": "text"}},
        "a text of prompt and response omits the observations: a conversation requires a chat template",
        ["reward.template", "environment"],
        "--set reward.template=own",
    ),
    "rows without the field": (
        {"kind": "choose", "cases": {"a": CLASS}, "field": "env"},
        {"data": {"train": COLUMNS}},
        "rows of [data.train] have no field `env`, which selects the environment",
        ["data.train.fields", "environment.field"],
        """--set 'data.train.fields=["level", "env"]'""",
    ),
    "evaluation rows without the field": (
        CLASS,
        {
            "data": {"train": COLUMNS, "eval": {"held": COLUMNS}},
            "eval": {
                "environment": {"kind": "choose", "cases": {"a": CLASS}, "field": "env", "turns": 2, "tokens": 9}
            },
        },
        "rows of [data.eval.held] have no field `env`, which selects the environment",
        ["data.eval.held.fields", "eval.environment.field"],
        """--set 'data.eval.held.fields=["level", "env"]'""",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_environment_without_effect_or_use_is_refused(case: str) -> None:
    environment, changes, message, keys, hint = REFUSED[case]
    [conflict] = conflicts(with_environment(environment, **changes))
    assert conflict.what == message
    assert [".".join(key) for key in conflict.keys] == keys
    assert conflict.hint == hint


ACCEPTED: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "as many turns as fit": ({**CLASS, "turns": 5, "tokens": 9, "tokens_per_turn": 6}, {"reward": OWN}),
    "one turn of a class": ({**CLASS, "turns": 1}, {"reward": {**OWN, "per_turn": True}}),
    "tools beside a class": (
        {"kind": "choose", "cases": {"a": TOOLS, "b": CLASS}, "field": "level"},
        {"reward": OWN},
    ),
    "evaluations of one turn": (CLASS, {"eval": {"environment": {"kind": "none"}}}),
    "environment of evaluations only": (None, {"eval": {"environment": {**CLASS, "turns": 2, "tokens": 9}}}),
    "sources of a mix": (
        {"kind": "choose", "cases": {"one": CLASS}, "field": "source"},
        {"data": {"train": {"format": "mix", "sources": {"one": {"format": "gsm8k", "path": "none"}}}}},
    ),
    "all fields": (
        {"kind": "choose", "cases": {"a": CLASS}, "field": "env"},
        {"data": {"train": {"format": "verl", "path": "none"}}},
    ),
    "truncated episodes": (CLASS, {"ppo": {"minibatch_seqs": 4, "truncated": "bootstrap"}}),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_environment_with_effect_is_accepted(case: str) -> None:
    environment, changes = ACCEPTED[case]
    recipe = with_environment(environment, **{"data": {"train": COLUMNS}, **changes})
    assert [conflict.what for rule in RULES for conflict in rule(recipe)] == []
