"""The recipe schema as a tree: the keys of each table, alternative tables, and the effect of each key.

Names are written as in TOML (`from`, not `from_`). A path is a tuple of names; `"*"` stands for any name that the
user chooses (evaluation sets, metric names, variables).
"""

import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag
from pydantic.fields import FieldInfo

from ppoctl.core.key_path import KeyPath
from ppoctl.core.recipe_table import Effect, KindOr, word_for_none
from ppoctl.recipe.docstring_fields import DocstringFields, parse_docstring

ANY_NAME = "*"


@dataclass(frozen=True)
class Leaf:
    """A key with one value."""

    annotation: Any


@dataclass(frozen=True)
class RecipeKey:
    """One key of a table."""

    attribute: str
    field: FieldInfo
    node: "Node"

    @property
    def effect(self) -> Effect | None:
        """The effect of changing the key; None for a table, whose keys have their own effects."""
        if not isinstance(self.node, Leaf):
            return None
        return next((item for item in self.field.metadata if isinstance(item, Effect)), None)

    @property
    def each(self) -> "RecipeKey | None":
        """The key of a single value, if the user chooses the names of values (`dict[str, str]`); otherwise None."""
        is_named = isinstance(self.node, NamedTables) and isinstance(self.node.each, Leaf)
        return replace(self, node=self.node.each) if is_named and isinstance(self.node, NamedTables) else None

    @property
    def description(self) -> str:
        """The prose of the key's docstring, on one line."""
        return self.marked.prose

    @property
    def marked(self) -> DocstringFields:
        """The docstring of the key, split into fields."""
        return parse_docstring(self.field.description or "")

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @cached_property
    def default(self) -> Any:
        """The default of the key; None for a required key."""
        return None if self.required else self.field.get_default(call_default_factory=True)


@dataclass(frozen=True)
class TableNode:
    """A table with known keys."""

    model: type[BaseModel]
    keys: Mapping[str, RecipeKey]


@dataclass(frozen=True)
class Choice:
    """Alternative tables. `tag` is the key that selects an alternative; None: the keys that are written select it."""

    tag: str | None
    tables: Mapping[str, TableNode]
    usual: str | None = None
    """The alternative of a table in which `tag` is not written; None: `tag` is required."""

    @property
    def tags(self) -> list[str]:
        """The values of `tag` in the schema. The usual alternative has none if its table lacks the key."""
        return [name for name, table in self.tables.items() if self.tag in table.keys]

    def chosen(self, written: Mapping[str, Any]) -> str | None:
        """Return the name of the alternative that the written keys select; None if they do not select any."""
        if self.tag is not None:
            value = written.get(self.tag)
            return value if isinstance(value, str) else None
        # Without a tag, a key that only one alternative has selects it.
        for name, table in self.tables.items():
            others = {key for other, rest in self.tables.items() if other != name for key in rest.keys}
            if any(key in table.keys and key not in others for key in written):
                return name
        return None

    def table(self, written: Mapping[str, Any]) -> "TableNode | None":
        """Return the alternative that the written keys select; if they do not select any, return the usual
        alternative.

        None: there is no usual alternative, or the written name is unknown.
        """
        return self.tables.get(self.chosen(written) or self.usual or "")


@dataclass(frozen=True)
class NamedTables:
    """A table whose keys are names that the user chooses. The value of each key is a table or a single value."""

    each: "Node"


Node = Leaf | TableNode | Choice | NamedTables


@cache
def of(model: type[BaseModel]) -> TableNode:
    """Return the tree of a table class."""
    keys = {}
    for attribute, field in model.model_fields.items():
        discriminator = field.discriminator or _discriminator(field.metadata)
        keys[field.alias or attribute] = RecipeKey(attribute, field, _node(field.annotation, discriminator))
    return TableNode(model, keys)


def _node(annotation: Any, discriminator: Discriminator | str | None) -> Node:
    while get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        discriminator = discriminator or _discriminator(metadata)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return of(annotation)
    if get_origin(annotation) is dict:
        return NamedTables(_node(get_args(annotation)[1], None))
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return _node(members[0], discriminator)
        if discriminator is not None:
            key = discriminator if isinstance(discriminator, str) else discriminator.discriminator
            tag = key if isinstance(key, str) else None
            tables = {name: of(table) for member in members for name, table in _named(member, tag)}
            return Choice(key.key, tables, key.usual) if isinstance(key, KindOr) else Choice(tag, tables)
    return Leaf(annotation)


def _discriminator(metadata: list[Any]) -> Discriminator | str | None:
    for item in metadata:
        if isinstance(item, Discriminator):
            return item
        if isinstance(item, FieldInfo) and item.discriminator is not None:
            return item.discriminator
    return None


def _named(member: Any, tag: str | None) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the names that select one alternative, each with its table class."""
    if tag is None:
        table, *metadata = get_args(member)
        yield next(item.tag for item in metadata if isinstance(item, Tag)), table
    else:
        for name in get_args(member.model_fields[tag].annotation):
            yield name, member


def allowed(annotation: Any) -> tuple[Any, ...]:
    """Return the allowed values of a `Literal` key; empty for any other key."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(value for member in get_args(annotation) for value in allowed(member))
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def walk(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, RecipeKey]]:
    """Yield every key of every alternative, including tables, in schema order."""
    if isinstance(node, TableNode):
        for name, key in node.keys.items():
            yield (*path, name), key
            if key.each is not None:
                yield (*path, name, ANY_NAME), key.each
            yield from walk(key.node, (*path, name))
    elif isinstance(node, Choice):
        for table in node.tables.values():
            yield from walk(table, path)
    elif isinstance(node, NamedTables):
        yield from walk(node.each, (*path, ANY_NAME))


def keys_at(node: Node, path: KeyPath) -> list[RecipeKey]:
    """Return the keys at a path, one for each alternative that has the path. If the user chooses the names of a
    table, any name matches."""
    if not path:
        return []
    if isinstance(node, Choice):
        return [key for table in node.tables.values() for key in keys_at(table, path)]
    if isinstance(node, NamedTables):
        return keys_at(node.each, path[1:])
    if not isinstance(node, TableNode) or path[0] not in node.keys:
        return []
    key = node.keys[path[0]]
    if key.each is not None and len(path) == 2:
        return [key.each]
    return keys_at(key.node, path[1:]) if path[1:] else [key]


@dataclass(frozen=True)
class Value:
    """One value of a recipe."""

    path: KeyPath
    key: RecipeKey
    value: Any
    usual: Any
    """The value if the key is not written: the value in the default of the parent table if this default has the same
    class, otherwise the default of the key."""

    @property
    def shown(self) -> Any:
        """The value as the user writes it: a word such as `all` instead of None, if the key has one."""
        return word_for_none(self.key.field.metadata) if self.value is None else self.value


def values(
    table: BaseModel, path: KeyPath = (), default: object = None, among: Collection[str] | None = None
) -> Iterator[Value]:
    """Yield every value of a recipe (or of one of its tables), including defaults.

    `default` is the table that applies if the table is not written. With `among`, only the values of the keys and
    tables with these names are read.
    """
    for name, key in of(type(table)).keys.items():
        if among is not None and name not in among:
            continue
        value = getattr(table, key.attribute)
        usual = getattr(default, key.attribute) if type(default) is type(table) else key.default
        if isinstance(value, BaseModel):
            yield from values(value, (*path, name), usual)
        elif isinstance(key.node, NamedTables):
            for chosen_name, inner in value.items():
                if key.each is not None:
                    yield Value((*path, name, chosen_name), key.each, inner, None)
                else:
                    yield from values(inner, (*path, name, chosen_name))
        else:
            yield Value((*path, name), key, value, usual)


def defaults_beside(table: TableNode, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the written tables, key by key.

    If only some keys of a table are written, the other keys have their defaults. A table that is not written is not
    included.
    """
    defaults: dict[str, Any] = {}
    for name, key in table.keys.items():
        inside = written.get(name)
        if not isinstance(inside, Mapping):
            continue
        default = key.default
        values = default.model_dump(by_alias=True, exclude_unset=True) if isinstance(default, BaseModel) else {}
        defaults[name] = values | _defaults_inside(key.node, {**values, **inside})
    return {name: values for name, values in defaults.items() if values}


def _defaults_inside(node: Node, written: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(node, Choice):
        table = node.table(written)
        return defaults_beside(table, written) if table else {}
    if isinstance(node, NamedTables):
        tables = {name: table for name, table in written.items() if isinstance(table, Mapping)}
        return {name: _defaults_inside(node.each, table) for name, table in tables.items()}
    return defaults_beside(node, written) if isinstance(node, TableNode) else {}


def without_tags(node: Node, loc: tuple[str | int, ...]) -> KeyPath:
    """Return the path in the TOML file for an error location of pydantic.

    A location of pydantic also contains the name of each selected alternative.
    """
    path: list[str] = []
    current: Node | None = node
    for name in map(str, loc):
        if isinstance(current, Choice):
            current = current.tables.get(name)
            continue
        path.append(name)
        current = _inside(current, name)
    return tuple(path)


def at(node: Node, path: KeyPath, written: Any) -> Node | None:
    """Return the node at `path`, choosing alternatives by the keys that are written.

    None: there is no such key, or the written keys do not select an alternative.
    """
    current: Node | None = node
    for name in path:
        if isinstance(current, Choice):
            current = current.table(written) if isinstance(written, Mapping) else None
        current = _inside(current, name)
        written = written.get(name) if isinstance(written, Mapping) else None
    return current


def _inside(node: Node | None, name: str) -> Node | None:
    """Return the node at this key of a table; None if the node is not a table or does not have the key."""
    if isinstance(node, TableNode):
        return node.keys[name].node if name in node.keys else None
    return node.each if isinstance(node, NamedTables) else None
