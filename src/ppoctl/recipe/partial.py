"""What is usable of a recipe that has errors, so that the cross-table rules can be judged in the same pass."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ppoctl.recipe import shape
from ppoctl.recipe.schema import Recipe


def partial(written: Mapping[str, Any], error: ValidationError) -> Recipe:
    """The recipe as far as it is valid. What is missing or wrong is absent: reading it raises AttributeError."""
    wrong = {shape.without_tags(shape.of(Recipe), details["loc"]) for details in error.errors(include_url=False)}
    recipe = _table(shape.of(Recipe), written, (), wrong)
    assert isinstance(recipe, Recipe)
    return recipe


def _table(table: shape.TableShape, written: Mapping[str, Any], path: shape.Path, wrong: set[shape.Path]) -> Any:
    usable: dict[str, Any] = {}
    absent: list[str] = []
    for name, key in table.keys.items():
        inner = (*path, name)
        # Of an array, pydantic names the wrong entry.
        is_wrong = inner in wrong or (isinstance(key.shape, shape.Leaf) and _is_within(inner, wrong))
        if is_wrong or (name not in written and key.required):
            absent.append(key.attribute)
        elif name in written:
            _keep(usable, absent, key, _value(key.shape, written[name], inner, wrong))
    made = table.model.model_construct(**usable)
    for attribute in absent:
        made.__dict__.pop(attribute, None)
    return made


def _is_within(path: shape.Path, wrong: set[shape.Path]) -> bool:
    return any(found[: len(path)] == path for found in wrong)


def _keep(usable: dict[str, Any], absent: list[str], key: shape.Key, value: Any) -> None:
    if value is None:
        absent.append(key.attribute)
    else:
        usable[key.field.alias or key.attribute] = value


def _value(here: shape.Shape, written: Any, path: shape.Path, wrong: set[shape.Path]) -> Any:
    """The value, or None when nothing of it is usable."""
    if isinstance(here, shape.Leaf):
        return tuple(written) if isinstance(written, list) else written
    if not isinstance(written, Mapping):
        return None
    if isinstance(here, shape.Choice):
        name = here.chosen(written)
        chosen = here.tables.get(name) if name else None
        return _table(chosen, written, path, wrong) if chosen else None
    if isinstance(here, shape.TableShape):
        return _table(here, written, path, wrong)
    return {
        name: _value(here.each, inner, (*path, name), wrong)
        for name, inner in written.items()
        if isinstance(inner, Mapping)
    }
