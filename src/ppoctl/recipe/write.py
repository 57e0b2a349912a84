"""A recipe as one TOML file with every key, composed and resolved, ready to be loaded again. Runs keep one."""

from collections.abc import Iterator, Mapping
from typing import Any

from ppoctl.recipe.explain import as_toml
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import HealthTable, Recipe
from ppoctl.table import OFF


def recipe_as_toml(recipe: Recipe) -> str:
    """TOML text; absent values are left out (TOML has no null) or, where they are not absent by default, `"off"`. So
    loading it gives an equal recipe."""
    values = recipe.model_dump(mode="json", by_alias=True)
    for name, rule in HealthTable().model_dump().items():
        bounds = values["health"][name]
        bounds |= {side: OFF for side in ("min", "max") if bounds[side] is None and rule[side] is not None}
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
