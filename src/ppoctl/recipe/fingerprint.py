"""Fingerprint of the recipe keys that affect the results of a stage, and the differences between two recipes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.recipe_table import Effect, Table
from ppoctl.recipe import schema_tree as tree

_KNOWN_AS = {"model.critic.path": "model.critic"}
"""Keys that keep an earlier name in fingerprints, so that runs from before the rename can still be resumed."""


AS_BEFORE: dict[KeyPath, str] = {("rollout", "special_tokens"): "drop"}
"""Values of keys that mean what versions without these keys did, if the default has another meaning. They are not
hashed, and a run that an earlier version created keeps them."""


def fingerprint(recipe: Table, paths: Sequence[str], *, without: Sequence[str] = ()) -> str:
    """Return the sha256 (hex) of the keys at or below `paths`, except those at or below `without`.

    Only keys that affect results and differ from their default are hashed, so that a new key with a default that
    means "as before" does not change existing fingerprints. The hashed text is canonical JSON: neither the order of
    tables nor the spelling of a number in TOML matters.

    Raises ValueError if a path is not in the schema: otherwise a misspelled path would hide a change of the key, and
    the stage would be reused.
    """
    tops, excluded = ([_path_of(type(recipe), path) for path in group] for group in (paths, without))
    chosen = {
        _KNOWN_AS.get(dotted(entry.path), dotted(entry.path)): entry.value
        for entry in tree.values(recipe, among={top[0] for top in tops})
        if entry.value != AS_BEFORE.get(entry.path, entry.usual)
        and entry.key.effect is Effect.RESULTS
        and _is_below(entry.path, tops)
        and not _is_below(entry.path, excluded)
    }
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def with_earlier_values(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe with the values of `AS_BEFORE` that it lacks."""
    complete = dict(resolved)
    for (table, key), value in AS_BEFORE.items():
        complete[table] = {key: value, **complete.get(table, {})}
    return complete


@cache
def _path_of(recipe: type[Table], written: str) -> KeyPath:
    path = tuple(written.split("."))
    if not tree.keys_at(tree.of(recipe), path):
        raise ValueError(f"`{written}` is not a recipe key")
    return path


def _is_below(path: KeyPath, tops: Sequence[KeyPath]) -> bool:
    return any(path[: len(top)] == top for top in tops)


def differences(old: Table, new: Table) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) of every key that differs.

    A value is None if the recipe does not have the key, because another alternative was chosen, or because an
    evaluation set was added or removed.
    """
    before, after = ({entry.path: entry.shown for entry in tree.values(recipe)} for recipe in (old, new))
    differing = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [(dotted(path), before.get(path), after.get(path)) for path in differing]


def result_differences(old: Table, new: Table) -> list[tuple[str, Any, Any]]:
    """Return the `differences` between two recipes in keys that affect results."""
    effects = {dotted(entry.path): entry.key.effect for recipe in (old, new) for entry in tree.values(recipe)}
    return [change for change in differences(old, new) if effects[change[0]] is Effect.RESULTS]
