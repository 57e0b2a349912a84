"""The usable part of a recipe with errors, so that the rules between tables are judged in the same pass."""

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator, ValidationError

from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.schema import Recipe


def partial(written: Mapping[str, Any], error: ValidationError) -> Recipe:
    """The recipe as far as it is valid. Reading a value that is missing or wrong raises AttributeError."""
    wrong = {tree.without_tags(tree.of(Recipe), details["loc"]) for details in error.errors(include_url=False)}
    recipe = _table(tree.of(Recipe), written, (), wrong)
    assert isinstance(recipe, Recipe)
    return recipe


def _table(table: tree.TableNode, written: Mapping[str, Any], path: KeyPath, wrong: set[KeyPath]) -> Any:
    usable: dict[str, Any] = {}
    absent: list[str] = []
    for name, key in table.keys.items():
        inner = (*path, name)
        # Of an array, and of values with names, pydantic names the wrong entry.
        is_wrong = inner in wrong or (_is_value(key) and _is_within(inner, wrong))
        if is_wrong or (name not in written and key.required):
            absent.append(key.attribute)
        elif name in written and (value := _rewritten(key, written[name])) is None:
            usable[name] = None
        elif name in written:
            _keep(usable, absent, key, _value(key.node, value, inner, wrong))
    made = table.model.model_construct(**usable)
    for attribute in absent:
        made.__dict__.pop(attribute, None)
    return made


def _rewritten(key: tree.RecipeKey, value: Any) -> Any:
    """The value that the key's own validators make of what is written; None where they make it absent."""
    for each in key.field.metadata:
        if isinstance(each, BeforeValidator):
            value = each.func(value)  # type: ignore[call-arg]  # ours take the value alone
    return value


def _is_value(key: tree.RecipeKey) -> bool:
    return isinstance(key.node, tree.Leaf) or key.each is not None


def _is_within(path: KeyPath, wrong: set[KeyPath]) -> bool:
    return any(found[: len(path)] == path for found in wrong)


def _keep(usable: dict[str, Any], absent: list[str], key: tree.RecipeKey, value: Any) -> None:
    if value is None:
        absent.append(key.attribute)
    else:
        usable[key.field.alias or key.attribute] = value


def _value(here: tree.Node, written: Any, path: KeyPath, wrong: set[KeyPath]) -> Any:
    """The usable value at this node, or None when nothing of it is usable."""
    if isinstance(here, tree.Leaf):
        return tuple(written) if isinstance(written, list) else written
    if not isinstance(written, Mapping):
        return None
    if isinstance(here, tree.Choice):
        chosen = here.table(written)
        return _table(chosen, written, path, wrong) if chosen else None
    if isinstance(here, tree.TableNode):
        return _table(here, written, path, wrong)
    return {
        name: _value(here.each, inner, (*path, name), wrong)
        for name, inner in written.items()
        if isinstance(inner, Mapping) or isinstance(here.each, tree.Leaf)
    }
