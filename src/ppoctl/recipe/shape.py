"""The schema as a tree one can walk: which keys a table has, which tables are alternatives, what each key changes.

Keys are spelled as in TOML (`from`, not `from_`). A path is a tuple of such names; `"*"` stands for any name
(evaluation sets, metric names).
"""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag
from pydantic.fields import FieldInfo

from ppoctl.table import Effect

Path = tuple[str, ...]
ANY_NAME = "*"


@dataclass(frozen=True)
class Leaf:
    """One value."""

    annotation: Any


@dataclass(frozen=True)
class Key:
    """One line a person may write."""

    attribute: str
    field: FieldInfo
    shape: "Shape"

    @property
    def effect(self) -> Effect | None:
        """What changing it changes; None for a table, whose keys have their own."""
        return next((item for item in self.field.metadata if isinstance(item, Effect)), None)

    @property
    def required(self) -> bool:
        return self.field.is_required()


@dataclass(frozen=True)
class TableShape:
    """A table with known keys."""

    model: type[BaseModel]
    keys: Mapping[str, Key]


@dataclass(frozen=True)
class Choice:
    """Alternative tables. `tag` is the key that names one; None: they are told apart by their own keys."""

    tag: str | None
    tables: Mapping[str, TableShape]

    def chosen(self, written: Mapping[str, Any]) -> str | None:
        """Which alternative the written keys ask for; None where they do not say."""
        if self.tag is not None:
            value = written.get(self.tag)
            return value if isinstance(value, str) else None
        for name, table in self.tables.items():
            others = {key for other, rest in self.tables.items() if other != name for key in rest.keys}
            if any(key in table.keys and key not in others for key in written):
                return name
        return None


@dataclass(frozen=True)
class Named:
    """A table whose keys are names a person chooses."""

    each: "Shape"


Shape = Leaf | TableShape | Choice | Named


@cache
def of(model: type[BaseModel]) -> TableShape:
    """The shape of a table class."""
    keys = {}
    for attribute, field in model.model_fields.items():
        discriminator = field.discriminator or _discriminator(field.metadata)
        keys[field.alias or attribute] = Key(attribute, field, _shape(field.annotation, discriminator))
    return TableShape(model, keys)


def _shape(annotation: Any, discriminator: Discriminator | str | None) -> Shape:
    while get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        discriminator = discriminator or _discriminator(metadata)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return of(annotation)
    if get_origin(annotation) is dict:
        return Named(_shape(get_args(annotation)[1], None))
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return _shape(members[0], discriminator)
        if discriminator is not None:
            key = discriminator if isinstance(discriminator, str) else discriminator.discriminator
            tag = key if isinstance(key, str) else None
            return Choice(tag, {name: of(table) for member in members for name, table in _named(member, tag)})
    return Leaf(annotation)


def _discriminator(metadata: list[Any]) -> Discriminator | str | None:
    for item in metadata:
        if isinstance(item, Discriminator):
            return item
        if isinstance(item, FieldInfo) and item.discriminator is not None:
            return item.discriminator
    return None


def _named(member: Any, tag: str | None) -> Iterator[tuple[str, type[BaseModel]]]:
    """The names under which one alternative is asked for."""
    if tag is None:
        table, *metadata = get_args(member)
        yield next(item.tag for item in metadata if isinstance(item, Tag)), table
    else:
        for name in get_args(member.model_fields[tag].annotation):
            yield name, member


def allowed(annotation: Any) -> tuple[Any, ...]:
    """The values a `Literal` key may have; empty for any other."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def walk(shape: Shape, path: Path = ()) -> Iterator[tuple[Path, Key]]:
    """Every key of every alternative, tables included, in the order of the schema."""
    if isinstance(shape, TableShape):
        for name, key in shape.keys.items():
            yield (*path, name), key
            yield from walk(key.shape, (*path, name))
    elif isinstance(shape, Choice):
        for table in shape.tables.values():
            yield from walk(table, path)
    elif isinstance(shape, Named):
        yield from walk(shape.each, (*path, ANY_NAME))


def values(table: BaseModel, path: Path = ()) -> Iterator[tuple[Path, Key, Any]]:
    """Every value of a recipe (or of one of its tables), defaults included, with the key that carries it."""
    for name, key in of(type(table)).keys.items():
        value = getattr(table, key.attribute)
        if isinstance(value, BaseModel):
            yield from values(value, (*path, name))
        elif isinstance(key.shape, Named):
            for each, inner in value.items():
                yield from values(inner, (*path, name, each))
        else:
            yield (*path, name), key, value


def defaults_beside(table: TableShape, written: Mapping[str, Any]) -> dict[str, Any]:
    """What the defaults of written tables say, key by key: to write one key of a table leaves the others as they
    were. Of a table that was not written there is nothing."""
    found: dict[str, Any] = {}
    for name, key in table.keys.items():
        inside = written.get(name)
        if not isinstance(inside, Mapping):
            continue
        default = None if key.required else key.field.get_default(call_default_factory=True)
        values = default.model_dump(by_alias=True, exclude_unset=True) if isinstance(default, BaseModel) else {}
        found[name] = values | _defaults_inside(key.shape, {**values, **inside})
    return {name: values for name, values in found.items() if values}


def _defaults_inside(shape: Shape, written: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(shape, Choice):
        chosen = shape.chosen(written)
        table = shape.tables.get(chosen) if chosen else None
        return defaults_beside(table, written) if table else {}
    if isinstance(shape, Named):
        tables = {name: each for name, each in written.items() if isinstance(each, Mapping)}
        return {name: _defaults_inside(shape.each, each) for name, each in tables.items()}
    return defaults_beside(shape, written) if isinstance(shape, TableShape) else {}


def without_tags(shape: Shape, loc: tuple[str | int, ...]) -> Path:
    """A location as pydantic reports it (with the name of each chosen alternative) as the path in the TOML file."""
    path: list[str] = []
    here: Shape | None = shape
    for step in loc:
        if isinstance(here, Choice):
            here = here.tables.get(str(step))
            continue
        path.append(str(step))
        if isinstance(here, TableShape):
            key = here.keys.get(str(step))
            here = key.shape if key else None
        else:
            here = here.each if isinstance(here, Named) else None
    return tuple(path)


def at(shape: Shape, path: Path, written: Any) -> Shape | None:
    """The shape at `path` of what was written; of alternatives the one the written keys choose, if clear."""
    here: Shape | None = shape
    for step in path:
        if isinstance(here, Choice):
            name = here.chosen(written) if isinstance(written, Mapping) else None
            here = here.tables.get(name) if name else None
        if isinstance(here, TableShape):
            key = here.keys.get(step)
            here = key.shape if key else None
        else:
            here = here.each if isinstance(here, Named) else None
        written = written.get(step) if isinstance(written, Mapping) else None
    return here
