"""Keys of a recipe that decide results: the fingerprint of a stage, and the difference of two recipes."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import Recipe
from ppoctl.table import Effect


def fingerprint(recipe: Recipe, paths: Sequence[str]) -> str:
    """sha256 (hex) of the keys at or below these dotted paths that change results and have not their default; speed
    and reporting keys never count. A key that a later version adds with a default changes no fingerprint therefore.
    Canonical JSON, so that the order of tables and the spelling of a number in TOML do not count either.

    Raises ValueError for a path that the schema does not have (a stage that misspells what it reads would be
    recalled although it changed).
    """
    for path in paths:
        if not tree.keys_at(tree.of(Recipe), tuple(path.split("."))):
            raise ValueError(f"`{path}` is no key of a recipe")
    chosen = {
        dotted(path): value
        for path, key, value in _not_default(recipe, None, ())
        if key.effect is Effect.RESULTS
        and any(path[: len(prefix)] == prefix for prefix in (tuple(item.split(".")) for item in paths))
    }
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every key that differs; None where one of the two does not have the key
    (another alternative was chosen, an evaluation set came or went)."""
    before, after = ({path: value for path, _, value in tree.values(recipe)} for recipe in (old, new))
    differing = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [(dotted(path), before.get(path), after.get(path)) for path in differing]


def result_differences(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """The `differences` of two recipes in keys that change results."""
    effects = {dotted(path): key.effect for recipe in (old, new) for path, key, _ in tree.values(recipe)}
    return [found for found in differences(old, new) if effects[found[0]] is Effect.RESULTS]


def _not_default(table: BaseModel, default: object, path: KeyPath) -> Iterator[tuple[KeyPath, tree.Key, Any]]:
    """Values of a table that differ from `default`, or, where that is another table or none, from their keys'
    defaults. The key that says which table was chosen has no default, and counts then."""
    is_another = type(default) is not type(table)
    for name, key in tree.of(type(table)).keys.items():
        value = getattr(table, key.attribute)
        usual = key.default if is_another else getattr(default, key.attribute)
        if isinstance(value, BaseModel):
            yield from _not_default(value, usual, (*path, name))
        elif isinstance(key.node, tree.NamedTables):
            for each, inner in value.items():
                yield from _not_default(inner, None, (*path, name, each))
        elif value != usual:
            yield (*path, name), key, value
