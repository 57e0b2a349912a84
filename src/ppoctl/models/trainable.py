"""The choice of the parameters of a model that train, by Megatron's names of the whole model.

A name is that of the torch layer spec, with layers and experts numbered as in the whole model
(`convert.tensors.Placement.parameter`), such as `decoder.layers.11.mlp.router.weight`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ppoctl.models.lora import Lora

EMBEDDING_PARAMETER = "embedding.word_embeddings.weight"
OUTPUT_PARAMETER = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Trainable:
    """Choice of the parameters that train. All others are frozen: they have no gradient and no optimizer state."""

    top_layers: int | None = None
    """Only the last layers of this number, the parameters after them, and the heads train. An output layer that is
    tied to the embedding is part of the embedding, which is then frozen. None: all layers."""
    freeze: tuple[str, ...] = ()
    """Glob patterns of names that are frozen in addition. A projection in a parameter with such a name has no
    adapter."""
    lora: Lora | None = None
    """Adapters that train. All weights of the model are then frozen, except those of a value head."""

    @property
    def is_all(self) -> bool:
        """Whether every parameter trains."""
        return self.top_layers is None and not self.freeze and self.lora is None

    def adapts(self, parameter: str) -> bool:
        """Return whether projections in the parameter of this name have adapters, if they are targets."""
        return self.lora is not None and not self.freezes(parameter)

    def freezes(self, name: str) -> bool:
        """Return whether a pattern freezes the parameter of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.freeze)


EVERYTHING = Trainable()
"""All parameters train."""


def trainable_from(fields: Mapping[str, Any]) -> Trainable:
    """Return the choice that `dataclasses.asdict` described, also after JSON, which has lists instead of tuples."""
    lora = fields.get("lora")
    if lora is not None:
        targets = lora["targets"]
        lora = Lora(lora["rank"], lora["alpha"], None if targets is None else tuple(targets))
    return Trainable(fields.get("top_layers"), tuple(fields.get("freeze", ())), lora)


def layer_of(name: str) -> int | None:
    """Return the layer of the parameter of this name; None: it belongs to no layer of the model."""
    found = _LAYER.match(name)
    return None if found is None else int(found.group(1))
