"""What a family is: how its configuration reads, and which tensors a layer has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppoctl.convert.fields import Allowed, From
from ppoctl.convert.rows import Row
from ppoctl.convert.shape import ModelShape


@dataclass(frozen=True)
class Family:
    """How one `model_type` reads. Every field of its configurations is in `reads`, `requires` or `ignores`."""

    classes: str
    """What the names of its classes in transformers begin with."""
    reads: Mapping[str, From]
    """Fields of `ModelShape` that the configuration decides."""
    requires: Mapping[str, Allowed]
    """Fields that must have certain values: what else they can say is not computed here."""
    attention: tuple[Row, ...]
    """Tensors of a layer, without its MLP."""
    mlp: tuple[Row, ...]
    """Tensors of a layer's MLP."""
    experts: tuple[Row, ...] = ()
    """The same of a layer that has experts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for a field that is read and that a configuration leaves out."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Older names of fields, and those they have now."""
    ignores: frozenset[str] = frozenset()
    """Fields without effect on the weights or on what is computed, given `requires`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelShape` that are the family's own."""

    @property
    def fields_read(self) -> frozenset[str]:
        """Fields of the configuration that decide something."""
        return frozenset(name for source in self.reads.values() for name in source.fields)

    def rows(self, shape: ModelShape, layer: int) -> tuple[Row, ...]:
        """Tensors of this layer of the model."""
        return self.attention + (self.experts if shape.has_experts(layer) else self.mlp)
