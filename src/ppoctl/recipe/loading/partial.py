"""The usable part of a recipe with errors. The rules across tables are checked on this part, so that all errors are
reported in one pass."""

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator, ValidationError

from ppoctl.core.key_path import KeyPath
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe


def partial(written: Mapping[str, Any], error: ValidationError) -> Recipe:
    """Return the valid part of a recipe. Reading a missing or wrong value from this part raises AttributeError."""
    wrong = {tree.without_tags(tree.of(Recipe), details["loc"]) for details in error.errors(include_url=False)}
    recipe = _table(tree.of(Recipe), written, (), wrong)
    assert isinstance(recipe, Recipe)
    return recipe


def _table(table: tree.TableNode, written: Mapping[str, Any], path: KeyPath, wrong: set[KeyPath]) -> Any:
    usable: dict[str, Any] = {}
    absent: list[str] = []
    for name, key in table.keys.items():
        inner = (*path, name)
        # For an array or a mapping, pydantic names the wrong entry, not the key.
        is_wrong = inner in wrong or (_is_value(key) and _is_within(inner, wrong))
        if is_wrong or (name not in written and key.required):
            absent.append(key.attribute)
        elif name in written and (value := _rewritten(key, written[name])) is None:
            usable[name] = None
        elif name in written:
            _keep(usable, absent, key, _value(key.node, value, inner, wrong))
    model = table.model.model_construct(**usable)
    for attribute in absent:
        model.__dict__.pop(attribute, None)
    return model


def _rewritten(key: tree.RecipeKey, value: Any) -> Any:
    """Apply the validators of the key to the written value. Returns None if the validators make the value absent."""
    for validator in key.field.metadata:
        if isinstance(validator, BeforeValidator):
            value = validator.func(value)  # type: ignore[call-arg]  # ppoctl's validators take only the value
    return value


def _is_value(key: tree.RecipeKey) -> bool:
    return isinstance(key.node, tree.Leaf) or key.each is not None


def _is_within(path: KeyPath, wrong: set[KeyPath]) -> bool:
    return any(wrong_path[: len(path)] == path for wrong_path in wrong)


def _keep(usable: dict[str, Any], absent: list[str], key: tree.RecipeKey, value: Any) -> None:
    if value is None:
        absent.append(key.attribute)
    else:
        usable[key.field.alias or key.attribute] = value


def _value(node: tree.Node, written: Any, path: KeyPath, wrong: set[KeyPath]) -> Any:
    """Return the usable part of the value at this node; None: no part is usable."""
    if isinstance(node, tree.Leaf):
        return tuple(written) if isinstance(written, list) else written
    if not isinstance(written, Mapping):
        return None
    if isinstance(node, tree.Choice):
        chosen = node.table(written)
        return _table(chosen, written, path, wrong) if chosen else None
    if isinstance(node, tree.TableNode):
        return _table(node, written, path, wrong)
    return {
        name: _value(node.each, inner, (*path, name), wrong)
        for name, inner in written.items()
        if isinstance(inner, Mapping) or isinstance(node.each, tree.Leaf)
    }
