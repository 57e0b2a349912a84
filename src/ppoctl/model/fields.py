"""The mapping from fields of a config.json to fields of a `ModelShape`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class UnsupportedValueError(ValueError):
    """A field asks for something that is not computed here; the text says what is."""


class From:
    """A field of `ModelShape` that is a function of these fields of the configuration."""

    def __init__(self, fields: str, read: Callable[..., Any] = lambda value: value) -> None:
        self.fields = tuple(fields.split())
        self.read = read

    def __call__(self, config: Mapping[str, Any]) -> Any:
        """The value of the field. A field that the configuration lacks reads as None."""
        return self.read(*(config.get(field) for field in self.fields))


class NestedFields(From):
    """A field of `ModelShape` that is a record of its own, read field by field."""

    def __init__(self, make: Callable[..., Any], reads: Mapping[str, From]) -> None:
        super().__init__(" ".join(name for source in reads.values() for name in source.fields))
        self.make = make
        self.reads = reads

    def __call__(self, config: Mapping[str, Any]) -> Any:
        return self.make(**{name: source(config) for name, source in self.reads.items()})


Allowed = Callable[[Any], bool]
"""Check whether the value of a field is computed here."""


class Only:
    """Values that a field may have; others are not computed here."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __call__(self, value: Any) -> bool:
        return value in self.values


def off(value: Any) -> bool:
    """Whether the thing that the field would turn on is off."""
    return not value


def on(value: Any) -> bool:
    """Whether the thing that the field can turn off is on."""
    return bool(value)


def only_full_attention(layer_types: list[str] | None) -> bool:
    """Whether no layer has a sliding window."""
    return set(layer_types or ()) <= {"full_attention"}


@dataclass(frozen=True)
class Family:
    """How configurations of one `model_type` are read. Every field they may have is in `reads`, `requires` or
    `ignores`."""

    classes: str
    """Beginning of the names of the family's classes in transformers."""
    reads: Mapping[str, From]
    """Fields of `ModelShape` that the configuration decides."""
    requires: Mapping[str, Allowed]
    """Fields that must have certain values, as their other values are not computed here."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers takes for fields that are read and that a configuration leaves out."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Older names of fields, and their names now."""
    ignores: frozenset[str] = frozenset()
    """Fields without effect on the weights or on what is computed, given `requires`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelShape` that have one value in the whole family."""

    @property
    def fields_read(self) -> frozenset[str]:
        """Fields of the configuration that decide something."""
        return frozenset(name for source in self.reads.values() for name in source.fields)
