"""How fields of a config.json become fields of a `ModelShape`."""

from collections.abc import Callable, Mapping
from typing import Any


class UnsupportedValueError(ValueError):
    """A field says something that is not computed here; the text says what is."""


class From:
    """A function of these fields of the configuration."""

    def __init__(self, fields: str, read: Callable[..., Any] = lambda value: value) -> None:
        self.fields = tuple(fields.split())
        self.read = read

    def __call__(self, config: Mapping[str, Any]) -> Any:
        """A field that the configuration lacks reads as None."""
        return self.read(*(config.get(field) for field in self.fields))


class Record(From):
    """A record of its own, field by field."""

    def __init__(self, make: Callable[..., Any], reads: Mapping[str, From]) -> None:
        super().__init__(" ".join(name for source in reads.values() for name in source.fields))
        self.make = make
        self.reads = reads

    def __call__(self, config: Mapping[str, Any]) -> Any:
        return self.make(**{name: source(config) for name, source in self.reads.items()})


Allowed = Callable[[Any], bool]
"""Whether a field says something that is computed here."""


class Only:
    """The values of a field that are computed here."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __call__(self, value: Any) -> bool:
        return value in self.values


def off(value: Any) -> bool:
    """What the field would turn on is off."""
    return not value


def on(value: Any) -> bool:
    """What the field can turn off is on."""
    return bool(value)


def only_full_attention(layer_types: list[str] | None) -> bool:
    """No layer has a sliding window."""
    return set(layer_types or ()) <= {"full_attention"}
