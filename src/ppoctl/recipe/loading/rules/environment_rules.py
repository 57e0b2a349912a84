"""Rules about `[environment]` and `[eval.environment]`: the limits of an episode can be reached, each row can have
its environment, and the reward reads what the environment returns.

See `all_rules`.
"""

import json
from collections.abc import Iterator

from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.environments.choose_environment import ChooseEnvironment
from ppoctl.environments.environment_kinds import NoEnvironment
from ppoctl.environments.environment_table import EpisodeTable
from ppoctl.environments.tools import ToolsEnvironment
from ppoctl.recipe.loading.rules.rows_rules import tables_of_rows
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.environment_reward import EnvironmentScorer
from ppoctl.rewards.model_reward import ModelScorer

_TABLE: KeyPath = ("environment",)
_OF_EVAL: KeyPath = ("eval", "environment")
_NEW: KeyPath = ("rollout", "max_new_tokens")
_NEW_OF_EVAL: KeyPath = ("eval", "max_new_tokens")
_LISTED = "ppoctl recipes keys environment"


def check_turns_reachable(recipe: Recipe) -> Iterator[Finding]:
    for table, path, new, new_key in _episodes(recipe):
        # Each turn generates at least one token, and each observation between two turns has at least one.
        most = min((table.tokens + 1) // 2, new)
        if table.turns > most:
            yield conflict(
                f"at most {most} turns fit: each has at least one token, and an observation at least one",
                ((*path, "turns"), (*path, "tokens"), new_key),
                f"--set {dotted(path)}.turns={most}",
            )


def check_new_tokens_reachable(recipe: Recipe) -> Iterator[Finding]:
    for table, path, new, new_key in _episodes(recipe):
        is_limit_of_training = path == _OF_EVAL and new_key == _NEW
        if new > table.tokens and not is_limit_of_training:
            yield conflict(
                f"an episode has at most {table.tokens} tokens, generated and observed, so the limit of generated "
                "tokens has no effect",
                (new_key, (*path, "tokens")),
                f"--set {dotted(new_key)}={table.tokens}",
            )


def check_turn_tokens_reachable(recipe: Recipe) -> Iterator[Finding]:
    for table, path, new, new_key in _episodes(recipe):
        per_turn = table.tokens_per_turn
        if per_turn is not None and per_turn > min(new, table.tokens):
            yield conflict(
                f"no turn has more than {min(new, table.tokens)} tokens, so the limit has no effect",
                ((*path, "tokens_per_turn"), (*path, "tokens"), new_key),
                f"--set {dotted(path)}.tokens_per_turn={min(new, table.tokens)}",
            )


def check_min_new_tokens_fit_turn(recipe: Recipe) -> Iterator[Finding]:
    table, fewest = recipe.environment, recipe.rollout.min_new_tokens
    if table is None:
        return
    for name in ("tokens_per_turn", "tokens"):
        limit = getattr(table, name)
        if limit is not None and limit < fewest:
            keys = (("rollout", "min_new_tokens"), (*_TABLE, name))
            yield conflict("the first turn cannot reach the minimum response length", keys)


def check_tools_have_two_turns(recipe: Recipe) -> Iterator[Finding]:
    for table, path, _, _ in _episodes(recipe):
        if table.turns == 1 and _has_only_tools(table):
            yield conflict(
                "the actor never reads the result of a tool: an episode ends after one turn",
                ((*path, "turns"), (*path, "kind")),
                f"--set {dotted(path)}.turns=4",
            )


def check_eval_environment_needed(recipe: Recipe) -> Iterator[Finding]:
    if isinstance(recipe.eval.environment, NoEnvironment) and recipe.environment is None:
        message = "responses of evaluations have one turn anyway, because there is no [environment]"
        yield conflict(message, ((*_OF_EVAL, "kind"),), f"remove [{dotted(_OF_EVAL)}]")


def check_environment_of_environment_reward(recipe: Recipe) -> Iterator[Finding]:
    for key in _environment_rewards(recipe):
        if recipe.environment is None:
            message = "the score is the reward of an environment, but the recipe has none"
            yield conflict(message, (key, _TABLE), _LISTED)
        elif recipe.eval_environment is None and recipe.data.eval:
            message = "the score is the reward of an environment, but evaluations have none"
            yield conflict(message, (key, (*_OF_EVAL, "kind")), f"remove [{dotted(_OF_EVAL)}]")


def check_environment_returns_rewards(recipe: Recipe) -> Iterator[Finding]:
    for key in _environment_rewards(recipe):
        if recipe.environment is not None and _has_only_tools(recipe.environment):
            yield conflict(
                "tools return no reward, so this score is always 0: score the answer with another kind",
                (key, (*_TABLE, "kind")),
                "ppoctl recipes keys reward",
            )


def check_reward_model_reads_conversation(recipe: Recipe) -> Iterator[Finding]:
    if recipe.environment is None:
        return
    for path, scorer in recipe.reward.scorers.items():
        if isinstance(scorer, ModelScorer) and scorer.template == "text":
            key = KeyPath(("reward", *path, "template"))
            message = "a text of prompt and response omits the observations: a conversation requires a chat template"
            yield conflict(message, (key, _TABLE), f"--set {dotted(key)}=own")


def check_rows_have_environment_field(recipe: Recipe) -> Iterator[Finding]:
    of_rows = {"train": (recipe.environment, _TABLE), "eval": (recipe.eval_environment, _eval_path(recipe))}
    for path, rows in tables_of_rows(recipe):
        table, key = of_rows[path[1]]
        is_source = isinstance(table, ChooseEnvironment) and table.field == "source" and path[-2] == "sources"
        if not isinstance(table, ChooseEnvironment) or is_source or rows.fields is None:
            continue
        if table.field not in rows.fields:
            listed = json.dumps([*rows.fields, table.field])
            yield conflict(
                f"rows of [{dotted(path)}] have no field `{table.field}`, which selects the environment",
                ((*path, "fields"), (*key, "field")),
                f"--set '{dotted(path)}.fields={listed}'",
            )


def _episodes(recipe: Recipe) -> Iterator[tuple[EpisodeTable, KeyPath, int, KeyPath]]:
    """Yield each environment with its key, and the maximum number of generated tokens with the key that sets it."""
    new = recipe.rollout.max_new_tokens
    if recipe.environment is not None:
        yield recipe.environment, _TABLE, new, _NEW
    of_eval, own = recipe.eval_environment, recipe.eval.max_new_tokens
    if of_eval is not None and (of_eval is not recipe.environment or own is not None):
        yield of_eval, _eval_path(recipe), own or new, _NEW if own is None else _NEW_OF_EVAL


def _eval_path(recipe: Recipe) -> KeyPath:
    return _TABLE if recipe.eval.environment is None else _OF_EVAL


def _has_only_tools(table: EpisodeTable) -> bool:
    # `loading.partial` leaves out an invalid case.
    return bool(table.kinds) and all(isinstance(kind, ToolsEnvironment) for kind in table.kinds.values())


def _environment_rewards(recipe: Recipe) -> Iterator[KeyPath]:
    """Yield the key `kind` of each scorer that reads the rewards of an environment."""
    for path, scorer in recipe.reward.scorers.items():
        if isinstance(scorer, EnvironmentScorer):
            yield ("reward", *path, "kind")
