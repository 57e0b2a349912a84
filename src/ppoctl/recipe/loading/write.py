"""Write a resolved recipe as one TOML file with every key, which can be loaded again. Each run keeps such a file."""

from collections.abc import Iterator, Mapping
from typing import Any

from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading.explain import as_toml
from ppoctl.recipe.schema import Recipe


def recipe_as_toml(recipe: Recipe) -> str:
    """Return the recipe as TOML text; loading it gives an equal recipe.

    Absent values are omitted, because TOML has no null. If the default of a key is not absent, its absent value is
    written as `"off"` or `"all"`.
    """
    values = recipe.model_dump(mode="json", by_alias=True)
    for entry in tree.values(recipe):
        if entry.value is None and entry.usual is not None:
            table = values
            for name in entry.path[:-1]:
                table = table[name]
            table[entry.path[-1]] = entry.shown
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
