"""Recipes as flat keys: differences of recipes, and a recipe as TOML."""

from collections.abc import Mapping, Sequence
from typing import Any

from ppoctl.core.errors import without_secrets
from ppoctl.recipe.loading.load import from_resolved
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.show.report.formatting import toml


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every key in dotted form, and the value of the key. A key that is not set has the value None."""
    keys: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[f"{prefix}{key}"] = value
    return keys


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the keys whose values differ between two recipes, each with both values."""
    left, right = flat(before), flat(after)
    return [(key, left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)]


def side_by_side(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each key whose values differ: the key, then its value in each recipe. Omits `name`."""
    all_flat = [flat(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for each in all_flat for key in each if key != "name")
    rows = [(key, *(toml(each.get(key)) for each in all_flat)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def as_text(recipe: Mapping[str, Any]) -> str:
    """Return the recipe as TOML, without secrets."""
    return without_secrets(recipe_as_toml(from_resolved(recipe)))
