"""What of a recipe decides results: the fingerprint of a stage, and the difference of two recipes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ppoctl.recipe import shape
from ppoctl.recipe.origins import dotted
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.table import Effect


def fingerprint(recipe: Recipe, paths: Sequence[str]) -> str:
    """sha256 (hex) of the keys at or below these dotted paths that change results; speed and reporting keys never
    count. Canonical JSON, so that the order of tables and the spelling of a number in TOML do not count either.

    Raises ValueError for a path that the schema does not have (a stage that misspells what it reads would be
    recalled although it changed).
    """
    for path in paths:
        if not _is_known(tuple(path.split("."))):
            raise ValueError(f"`{path}` is no key of a recipe")
    chosen = {
        dotted(path): value
        for path, value in _results(recipe).items()
        if any(path[: len(prefix)] == prefix for prefix in (tuple(item.split(".")) for item in paths))
    }
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def result_differences(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """The `differences` in keys that change results."""
    return _differences(_results(old), _results(new))


def differences(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every key that differs; None where one of the two does not have the key
    (another alternative was chosen, an evaluation set came or went)."""
    before, after = ({path: value for path, _, value in shape.values(recipe)} for recipe in (old, new))
    return _differences(before, after)


def _differences(before: dict[shape.Path, Any], after: dict[shape.Path, Any]) -> list[tuple[str, Any, Any]]:
    paths = list(dict.fromkeys([*before, *after]))
    differing = [path for path in paths if before.get(path) != after.get(path)]
    return [(dotted(path), before.get(path), after.get(path)) for path in differing]


def _results(recipe: Recipe) -> dict[shape.Path, Any]:
    return {path: value for path, key, value in shape.values(recipe) if key.effect is Effect.RESULTS}


def _is_known(path: shape.Path) -> bool:
    """Whether a recipe may have something at this path; any name stands for an evaluation set."""
    return any(
        len(known) >= len(path) and all(a in (b, shape.ANY_NAME) for a, b in zip(known, path, strict=False))
        for known, _ in shape.walk(shape.of(Recipe))
    )
