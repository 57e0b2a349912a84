"""Every key of a recipe, as `ppoctl recipes keys` prints it: type, default, range, effect and meaning."""

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from ppoctl.core.key_path import KeyPath
from ppoctl.core.recipe_table import word_for_none
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading.explain import as_toml, section
from ppoctl.recipe.schema import Recipe

REQUIRED = "required"


@dataclass(frozen=True)
class KeyLine:
    """One key, as it is printed."""

    key: str
    only: str
    """The alternative that the key belongs to (`place = "loss"`), or the table that must be written; empty: the key
    always exists."""
    type: str
    default: str
    """Default of the key as TOML; `absent`; or `required`."""
    range: str
    changes: str
    meaning: str


def key_lines() -> list[KeyLine]:
    """Return every key of a recipe, in schema order."""
    return list(_of_table(tree.of(Recipe), (), None))


def _of_table(table: tree.TableNode, path: KeyPath, default: BaseModel | None) -> Iterator[KeyLine]:
    for name, key in table.keys.items():
        inner, value = (*path, name), _default(key, default)
        if key.each is not None:
            yield key_line((*inner, tree.ANY_NAME), key.each, None)
        elif isinstance(key.node, tree.Leaf):
            yield key_line(inner, key, value)
        elif isinstance(key.node, tree.NamedTables):
            yield from _of_shape(key.node.each, (*inner, tree.ANY_NAME), None)
        else:
            lines = _of_shape(key.node, inner, value if isinstance(value, BaseModel) else None)
            # The keys of an optional table exist only if the table is written. A line that names an alternative or a
            # table inside implies this.
            yield from (
                lines
                if value is not None
                else (line if line.only else replace(line, only=section(inner)) for line in lines)
            )


def _of_shape(node: tree.Node, path: KeyPath, default: BaseModel | None) -> Iterator[KeyLine]:
    if isinstance(node, tree.TableNode):
        yield from _of_table(node, path, default)
    elif isinstance(node, tree.Choice):
        yield from _of_choice(node, path, default)


def _of_choice(choice: tree.Choice, path: KeyPath, default: BaseModel | None) -> Iterator[KeyLine]:
    """Yield the lines of all alternatives; a line that all alternatives share is yielded once, without the name of an
    alternative, and so is a line of an alternative that no value of the tag selects."""
    untagged = {*choice.tables} - {*choice.tags} if choice.tag is not None else set()
    if choice.tag is not None and not untagged:
        yield _tag_line(choice, (*path, choice.tag), default)
    # Keys of the same name may differ between alternatives in range or meaning: each variant is a separate line.
    owners: dict[KeyLine, list[str]] = {}
    for name, table in choice.tables.items():
        for line in _of_table(table, path, default if isinstance(default, table.model) else None):
            # The tag has its own line, from `_tag_line`.
            if untagged or line.key != ".".join((*path, choice.tag or "")):
                owners.setdefault(line, []).append(name)
    usual = [name for name, table in choice.tables.items() if isinstance(default, table.model)]
    for line, names in owners.items():
        is_in_all = len(names) == len(choice.tables) or {*names} == untagged
        yield line if is_in_all or line.only else replace(line, only=_alternatives(choice.tag, names, usual))


def _alternatives(tag: str | None, names: list[str], usual: list[str]) -> str:
    if tag is None:  # without a tag line, the default alternative is marked here
        return f"by {names[0]}" + (" (the default)" if names == usual else "")
    return f"{tag} = " + " or ".join(f'"{name}"' for name in names)


def _tag_line(choice: tree.Choice, path: KeyPath, default: BaseModel | None) -> KeyLine:
    """Return the line of the key that selects the alternative."""
    assert choice.tag is not None
    keys = {name: table.keys[choice.tag] for name, table in choice.tables.items()}
    first = next(iter(keys.values()))
    meaning = " ".join(f"{name}: {key.description}" for name, key in keys.items())
    value = REQUIRED if default is None else as_toml(getattr(default, first.attribute))
    effect = first.effect.value if first.effect else ""
    return KeyLine(".".join(path), "", " | ".join(f'"{name}"' for name in keys), value, "", effect, meaning)


def _default(key: tree.RecipeKey, table: BaseModel | None) -> Any:
    if table is not None:
        return getattr(table, key.attribute)
    return REQUIRED if key.required else key.default


def key_line(path: KeyPath, key: tree.RecipeKey, value: Any) -> KeyLine:
    """Return the line of a key that is not a table, with the default `value`."""
    default = REQUIRED if key.required and value is REQUIRED else as_toml(value)
    effect = key.effect.value if key.effect else ""
    annotation = key.field.annotation if path[-1] != tree.ANY_NAME else get_args(key.field.annotation)[1]
    return KeyLine(".".join(path), "", _type(annotation), default, _range(key), effect, key.description)


def _type(annotation: Any) -> str:
    """Return the type of a key in plain words."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(_type(member) for member in get_args(annotation) if member is not type(None))
    allowed = tree.allowed(annotation)
    if allowed:
        return " | ".join(f'"{value}"' for value in allowed)
    if get_origin(annotation) is tuple:
        first, *rest = get_args(annotation)
        return f"array of {_type(first)}" if rest == [...] else f"array of {1 + len(rest)} {_type(first)}s"
    return {bool: "true | false", int: "whole number", float: "number", str: "text", Any: "any value"}[annotation]


def _range(key: tree.RecipeKey) -> str:
    """Return the bounds of a key in words, and the word that makes the key absent, if the key has such a word."""
    words = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
    parts = []
    for constraint in key.field.metadata:
        parts += [f"{word} {getattr(constraint, bound)}" for bound, word in words if hasattr(constraint, bound)]
        if getattr(constraint, "pattern", None):
            parts.append(f"matches {constraint.pattern}")
    if word := word_for_none(key.field.metadata):
        parts.append(f'or "{word}"')
    return ", ".join(parts)
