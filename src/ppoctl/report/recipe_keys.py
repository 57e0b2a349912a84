"""Recipes as flat keys: what two of them differ in, and one as the text of its file."""

from collections.abc import Mapping, Sequence
from typing import Any

from ppoctl.errors import without_secrets
from ppoctl.loading.load import from_resolved
from ppoctl.loading.write import recipe_as_toml
from ppoctl.report.formatting import toml


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every key with dots, and its value; keys that are not set have None."""
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys in which two recipes differ, each with both values."""
    left, right = flat(before), flat(after)
    return [(key, left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)]


def side_by_side(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each key in which not all recipes agree: the key, then its value in each. The name is none."""
    all_flat = [flat(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for each in all_flat for key in each if key != "name")
    rows = [(key, *(toml(each.get(key)) for each in all_flat)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def as_text(recipe: Mapping[str, Any]) -> str:
    """The recipe as the TOML file that would give it, without secrets."""
    return without_secrets(recipe_as_toml(from_resolved(recipe)))
