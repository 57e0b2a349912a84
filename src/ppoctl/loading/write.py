"""A recipe as one TOML file with every key, composed and resolved, ready to be loaded again. Runs keep one."""

from collections.abc import Iterator, Mapping
from typing import Any

from ppoctl.loading.explain import as_toml
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import Recipe


def recipe_as_toml(recipe: Recipe) -> str:
    """TOML text; absent values are left out (TOML has no null) or, where they are not absent by default, `"off"` or
    `"all"`. So loading it gives an equal recipe."""
    values = recipe.model_dump(mode="json", by_alias=True)
    for found in tree.values(recipe):
        if found.value is None and found.usual is not None:
            table = values
            for name in found.path[:-1]:
                table = table[name]
            table[found.path[-1]] = found.shown
    return "\n".join(_table(values, ())).lstrip("\n") + "\n"


def _table(values: Mapping[str, Any], path: KeyPath) -> Iterator[str]:
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, Mapping)}
    if path and plain:
        yield ""
        yield f"[{dotted(path)}]"
    for key, value in plain.items():
        yield f"{dotted((key,))} = {as_toml(value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _table(value, (*path, key))
