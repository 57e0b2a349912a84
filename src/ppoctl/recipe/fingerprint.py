"""Keys of a recipe that decide results: the fingerprint of a stage, and the difference of two recipes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe_table import Effect

_KNOWN_AS = {"model.critic.path": "model.critic"}
"""Keys that have another name in fingerprints: what they were called when there were runs."""


def fingerprint(recipe: Recipe, paths: Sequence[str], *, without: Sequence[str] = ()) -> str:
    """sha256 (hex) of the keys at or below these dotted paths, and not at or below those in `without`, that change
    results and have not their default; speed and reporting keys never count. A key that a later version adds with a
    default changes no fingerprint therefore. Canonical JSON, so that the order of tables and the spelling of a number
    in TOML do not count either.

    Raises ValueError for a path that the schema does not have (a stage that misspells what it reads would be
    recalled although it changed).
    """
    for path in (*paths, *without):
        if not tree.keys_at(tree.of(Recipe), tuple(path.split("."))):
            raise ValueError(f"`{path}` is no key of a recipe")
    chosen = {
        _KNOWN_AS.get(dotted(found.path), dotted(found.path)): found.value
        for found in tree.values(recipe)
        if found.value != found.usual
        and found.key.effect is Effect.RESULTS
        and _is_below(found.path, paths)
        and not _is_below(found.path, without)
    }
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_below(path: KeyPath, tops: Sequence[str]) -> bool:
    return any(path[: len(prefix)] == prefix for prefix in (tuple(top.split(".")) for top in tops))


def differences(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every key that differs; None where one of the two does not have the key
    (another alternative was chosen, an evaluation set came or went)."""
    before, after = ({found.path: found.shown for found in tree.values(recipe)} for recipe in (old, new))
    differing = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [(dotted(path), before.get(path), after.get(path)) for path in differing]


def result_differences(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """The `differences` of two recipes in keys that change results."""
    effects = {dotted(found.path): found.key.effect for recipe in (old, new) for found in tree.values(recipe)}
    return [found for found in differences(old, new) if effects[found[0]] is Effect.RESULTS]
