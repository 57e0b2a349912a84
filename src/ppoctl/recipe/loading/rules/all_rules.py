"""Rules between the keys of several tables. Each rule is a function `check_*`.

A rule yields conflicts, or notes on settings that may be unintended, and never changes a value. All rules are checked
in one pass. Each conflict names its keys, their values and their origins. A recipe may lack values (see `partial`):
reading a missing value raises AttributeError, and the rule is then skipped.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from ppoctl.algorithms.role_table import ByTokens
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.algorithms.sizes import (
    longest_sequence,
    microbatch_limit,
    minibatch_seqs,
    sequences_per_step,
    updates_per_step,
)
from ppoctl.core.errors import holds_secret
from ppoctl.core.finding import Finding, Level, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.data.row_tables import DialogueRows, Gsm8kRows
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading import capabilities
from ppoctl.recipe.loading.explain import shown
from ppoctl.recipe.loading.origins import DEFAULT
from ppoctl.recipe.loading.rules import (
    ahead_rules,
    correction_rules,
    critic_rules,
    environment_rules,
    estimators_rules,
    evaluation_rules,
    frozen_rules,
    groups_rules,
    kl_rules,
    layout_rules,
    lora_rules,
    losses_rules,
    metrics_rules,
    resampling_rules,
    rewards_rules,
    router_rules,
    rows_rules,
    sampling_rules,
    schedule_rules,
    slurm_rules,
    until_rules,
    value_head_rules,
)
from ppoctl.recipe.loading.rules.rows_rules import has_truth, tables_of_rows
from ppoctl.recipe.parallel import is_one_process
from ppoctl.recipe.schema import HealthRule, Recipe
from ppoctl.rewards.choose_reward import ChooseReward
from ppoctl.rewards.exact_match import ExactMatchScorer


def check_minibatch_divides_step(recipe: Recipe) -> Iterator[Finding]:
    sequences = sequences_per_step(recipe)
    for key in (_MINIBATCH, _CRITIC_MINIBATCH):
        minibatch = getattr(recipe.ppo, key[-1])
        if minibatch is not None and sequences % minibatch:
            yield conflict(
                f"the {sequences} sequences of a step do not divide into minibatches of {minibatch}",
                (key, _PROMPTS, _SAMPLES),
                f"--set {dotted(key)}={_nearest_divisor(sequences, minibatch)}",
            )


def check_microbatch_size(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        size, minibatch = getattr(table.batching, "microbatch_seqs", 0), minibatch_seqs(recipe, role)
        if size > minibatch:
            has_own = head_of(role) == "value" and recipe.ppo.critic_minibatch_seqs is not None
            yield conflict(
                f"a microbatch of {size} sequences is larger than its minibatch of {minibatch}",
                ((role, "batching", "microbatch_seqs"), _CRITIC_MINIBATCH if has_own else _MINIBATCH),
                f"--set {role}.batching.microbatch_seqs={minibatch}",
            )


def check_microbatch_fits_longest_sequence(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        if not isinstance(table.batching, ByTokens):
            continue
        for name in ("max_tokens_per_microbatch", "forward_max_tokens_per_microbatch"):
            # With `bootstrap`, values need the last token of a truncated response too.
            has_values = head_of(role) == "value" or recipe.value_head is not None
            includes_last = recipe.ppo.truncated == "bootstrap" and has_values
            scores = microbatch_limit(table.batching, with_gradient=False)[0] == name
            longest = longest_sequence(recipe) + (includes_last and scores)
            cap = getattr(table.batching, name)
            if cap is not None and cap < longest:
                key = (role, "batching", name)
                yield conflict(
                    f"a microbatch of {cap} tokens cannot contain a sequence of "
                    f"{longest} (prompt + response{_LAST_TOKEN[includes_last and scores]})",
                    (key, _PROMPT_TOKENS, _NEW_TOKENS),
                    f"--set {dotted(key)}={longest}",
                )


def check_actor_trains(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.critic_only_steps >= recipe.steps:
        yield conflict(
            f"the actor never trains: {recipe.ppo.critic_only_steps} critic-only steps of {recipe.steps}",
            (("ppo", "critic_only_steps"), ("steps",)),
        )


def check_whitening_batch(recipe: Recipe) -> Iterator[Finding]:
    """Check that advantages are whitened over more than one sequence.

    With lambda and gamma 1, the advantages of one sequence have one sign; whitening would flip the sign of some
    advantages.
    """
    sequences = sequences_per_step(recipe)
    if recipe.ppo.advantages.whiten and sequences == 1:
        yield conflict(
            "whitening the advantages of a single sequence removes the effect of its reward",
            (("ppo", "advantages", "whiten"), _PROMPTS, _SAMPLES),
            "--set ppo.advantages.whiten=false",
        )


def check_reward_has_ground_truth(recipe: Recipe) -> Iterator[Finding]:
    """Check that the rows have a ground truth that the reward can compare with a response.

    The ground truth of a GSM8K row is the number after `####`, which a complete response almost never equals.
    """
    for path, table in tables_of_rows(recipe):
        if recipe.reward.reads_truth and path[1] == "train" and not has_truth(table):
            is_chat = isinstance(table, DialogueRows)
            yield conflict(
                f"the reward compares with a ground truth, but [{dotted(path)}] "
                + ("has none: its rows are dialogues" if is_chat else "does not name a column for it"),
                ((*path, "format"), ("reward", "kind")),
                None if is_chat else f"--set {dotted(path)}.answer=COLUMN",
            )
    is_bare = isinstance(recipe.data.train, Gsm8kRows) and not recipe.data.train.instruction
    scorers = () if isinstance(recipe.reward, ChooseReward) else recipe.reward.singles
    if is_bare and any(isinstance(scorer, ExactMatchScorer) for scorer in scorers):
        yield conflict(
            "an exact match with GSM8K's number requires an instruction to answer with only the number",
            (("reward", "kind"), ("data", "train", "format"), ("data", "train", "instruction")),
            "--set reward.kind=gsm8k",
        )


def check_health_bounds(recipe: Recipe) -> Iterator[Finding]:
    for name in tree.of(type(recipe.health)).keys:
        rule: HealthRule = getattr(recipe.health, name)
        if rule.min is not None and rule.max is not None and rule.min > rule.max:
            yield conflict(
                f"no value is at least {rule.min} and at most {rule.max}",
                (("health", name, "min"), ("health", name, "max")),
            )


def check_stop_rule_has_bound(recipe: Recipe) -> Iterator[Finding]:
    for name in tree.of(type(recipe.health)).keys:
        rule: HealthRule = getattr(recipe.health, name)
        if rule.action == "stop" and rule.min is None and rule.max is None:
            yield conflict(
                f"[health.{name}] stops the run but has neither `min` nor `max`", (("health", name, "action"),)
            )


def check_no_secrets(recipe: Recipe) -> Iterator[Finding]:
    """Check that no value contains a secret: a recipe is stored in the run directory and sent to MLflow."""
    for entry in tree.values(recipe):
        if isinstance(entry.value, str) and holds_secret(entry.value):
            yield conflict(
                f"`{dotted(entry.path)}` contains a password or a token, but a recipe is stored in the run and "
                f"sent to MLflow",
                (entry.path,),
                _SECRET_URI if entry.path == ("tracking", "uri") else None,
                kind="secret",
            )


def check_ray_address_used(recipe: Recipe) -> Iterator[Finding]:
    if recipe.cluster.ray_address is not None and is_one_process(recipe):
        yield conflict(
            "Ray is not used: each role is one process on this machine",
            (("cluster", "ray_address"),),
            "--set 'actor.parallel={data=2}'",
            level=Level.NOTE,
        )


def check_bootstrap_value_is_intended(recipe: Recipe) -> Iterator[Finding]:
    advantages = recipe.ppo.advantages
    if advantages.trains_critic and not advantages.reads_values and recipe.ppo.truncated == "bootstrap":
        yield conflict(
            "the critic's value is added to the return of each truncated response, but the advantages use no values "
            "elsewhere",
            (("ppo", "truncated"), ("ppo", "advantages", "kind")),
            "--set ppo.truncated=terminal",
            level=Level.NOTE,
        )


def check_reinforce_is_on_policy(recipe: Recipe) -> Iterator[Finding]:
    updates = updates_per_step(recipe, POLICY)
    if recipe.ppo.policy_loss.kind == "reinforce" and updates > 1:
        yield conflict(
            "the loss has no ratio to the policy that generated the responses, and the actor makes "
            f"{updates} updates per step: all but the first are off-policy",
            (("ppo", "policy_loss", "kind"), ("ppo", "epochs"), _MINIBATCH),
            f"--set ppo.epochs=1 --set ppo.minibatch_seqs={sequences_per_step(recipe)}",
            level=Level.NOTE,
        )


Rule = Callable[[Recipe], Iterator[Finding]]
"""A function that yields each conflict that it finds between keys of a recipe."""


def rules_of(module: ModuleType) -> tuple[Rule, ...]:
    """Return the rules of a module, its functions `check_*`, in the order of their definition."""
    return tuple(member for name, member in vars(module).items() if name.startswith("check_"))


_MODULES = (
    sys.modules[__name__],
    ahead_rules,
    capabilities,
    rewards_rules,
    router_rules,
    rows_rules,
    schedule_rules,
    resampling_rules,
    kl_rules,
    losses_rules,
    estimators_rules,
    correction_rules,
    critic_rules,
    value_head_rules,
    metrics_rules,
    until_rules,
    evaluation_rules,
    sampling_rules,
    groups_rules,
    environment_rules,
    layout_rules,
    frozen_rules,
    lora_rules,
    slurm_rules,
)
RULES = tuple(rule for module in _MODULES for rule in rules_of(module))

_LAST_TOKEN = {
    False: " - 1: the last token is predicted, not read",
    True: ": the critic also reads the last token of a truncated response",
}
_MINIBATCH: KeyPath = ("ppo", "minibatch_seqs")
_CRITIC_MINIBATCH: KeyPath = ("ppo", "critic_minibatch_seqs")
_PROMPTS: KeyPath = ("rollout", "prompts_per_step")
_SAMPLES: KeyPath = ("rollout", "samples_per_prompt")
_PROMPT_TOKENS: KeyPath = ("rollout", "max_prompt_tokens")
_NEW_TOKENS: KeyPath = ("rollout", "max_new_tokens")
_SECRET_URI = (
    "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (of a server), or export the complete URI as a "
    'variable, such as TRACKING_URI, and write `tracking.uri = "$TRACKING_URI"`'
)


def violations(recipe: Recipe, place: Callable[[KeyPath], str]) -> list[Finding]:
    """Return all conflicts of a recipe, with the values and origins (`place`) of their keys."""
    found: list[Finding] = []
    for rule in RULES:
        try:
            found.extend(_located(conflict, recipe, place) for conflict in rule(recipe))
        except AttributeError:
            # A value is missing, so the rule is skipped. In a complete recipe the error is a defect of the rule.
            if _is_complete(recipe):
                raise
    return found


def _located(conflict: Finding, recipe: Recipe, place: Callable[[KeyPath], str]) -> Finding:
    settings = []
    for key in conflict.keys:
        value = _value_at(recipe, key)
        if value is not None and conflict.kind != "secret":
            settings.append(f"`{dotted(key)}` = `{shown(value)}` ({place(key)})")
    changed = next((place(key) for key in conflict.keys if place(key) != DEFAULT), "")
    hint = conflict.hint
    if hint is not None and hint.startswith("--set"):
        hint = f"change the recipe, or add `{hint}`"
    what = conflict.what + (f": {', '.join(settings)}" if settings else "")
    return replace(conflict, what=what, where=changed, hint=hint)


def _value_at(recipe: Recipe, key: KeyPath) -> Any:
    value: Any = recipe
    for name in key:
        value = (
            value.get(name) if isinstance(value, dict) else getattr(value, {"from": "from_"}.get(name, name), None)
        )
    return list(value) if isinstance(value, tuple) else value if isinstance(value, str | int | float) else None


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((size for size in range(1, number + 1) if number % size == 0), key=lambda size: abs(size - wanted))


def _is_complete(recipe: Recipe) -> bool:
    try:
        return all(True for _ in tree.values(recipe))
    except AttributeError:
        return False
