"""The mapping from fields of a config.json to fields of a `ModelShape`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class UnsupportedValueError(ValueError):
    """The value of a field requires a computation that ppoctl does not support. The message lists the supported
    values."""


class From:
    """A field of `ModelShape`, computed from fields of the configuration."""

    def __init__(self, fields: str, read: Callable[..., Any] = lambda value: value) -> None:
        self.fields = tuple(fields.split())
        self.read = read

    def __call__(self, config: Mapping[str, Any]) -> Any:
        """Return the value of the field. Fields that the configuration lacks are passed as None."""
        return self.read(*(config.get(field) for field in self.fields))


class NestedFields(From):
    """A field of `ModelShape` that is itself a record, built field by field."""

    def __init__(self, make: Callable[..., Any], reads: Mapping[str, From]) -> None:
        super().__init__(" ".join(name for source in reads.values() for name in source.fields))
        self.make = make
        self.reads = reads

    def __call__(self, config: Mapping[str, Any]) -> Any:
        return self.make(**{name: source(config) for name, source in self.reads.items()})


Allowed = Callable[[Any], bool]
"""Function that returns whether the value of a field is supported."""


class Only:
    """The supported values of a field."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __call__(self, value: Any) -> bool:
        return value in self.values


def off(value: Any) -> bool:
    """Whether the value turns the feature of the field off."""
    return not value


def on(value: Any) -> bool:
    """Whether the value enables the feature that the field controls."""
    return bool(value)


def only_full_attention(layer_types: list[str] | None) -> bool:
    """Whether no layer has a sliding window."""
    return set(layer_types or ()) <= {"full_attention"}


@dataclass(frozen=True)
class Family:
    """Rules for reading configurations of one `model_type`. All fields that they may have are in `reads`, `requires`
    or `ignores`."""

    classes: str
    """Prefix of the names of the family's classes in transformers."""
    reads: Mapping[str, From]
    """Fields of `ModelShape` that the configuration determines."""
    requires: Mapping[str, Allowed]
    """Fields that must have certain values, because ppoctl does not support the others."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for fields that are read."""
    rope_thetas: Mapping[str, float] = field(default_factory=dict)
    """Default base period of RoPE for each type of layer. Empty: all layers have the same RoPE."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Older names of fields, and their current names."""
    ignores: frozenset[str] = frozenset()
    """Fields without effect on weights or outputs, if the fields of `requires` have supported values."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelShape` with the same value in the whole family."""

    classifier: str | None = None
    """Class in transformers of a model with a head instead of logits; None: `classes` + ForSequenceClassification."""
    call_format: str | None = None
    """Format in which the family's models write tool calls, by the name of vLLM's parser. None: they have none."""

    @property
    def fields_read(self) -> frozenset[str]:
        """Fields of the configuration that affect the `ModelShape`."""
        return frozenset(name for source in self.reads.values() for name in source.fields)
