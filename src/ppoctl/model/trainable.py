"""The parameters of a model that train, by Megatron's names of the whole model, and where the frozen trunk ends.

A name is that of the torch layer spec, with layers and experts numbered as in the whole model
(`convert.tensors.Placement.parameter`), such as `decoder.layers.11.mlp.router.weight`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ppoctl.model.head import VALUE_HEAD_PREFIX, Head
from ppoctl.model.lora import Lora, adapted_parameter, is_adapter
from ppoctl.model.shape import ModelShape

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
        return self.lora is not None and not self._is_frozen(parameter)

    def trains(self, name: str, shape: ModelShape, head: Head) -> bool:
        """Return whether the parameter of this name trains."""
        if name == OUTPUT_PARAMETER and head == "token" and shape.tied_embeddings:
            name = EMBEDDING_PARAMETER  # the copy of the embedding on the last pipeline rank
        if self.lora is None:
            return self._is_in_top(name, shape) and not self._is_frozen(name)
        if is_adapter(name):
            return self.adapts(adapted_parameter(name))
        is_value_head = name.startswith(VALUE_HEAD_PREFIX) or (name == OUTPUT_PARAMETER and head == "value")
        return is_value_head and not self._is_frozen(name)

    def _is_frozen(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.freeze)

    def _is_in_top(self, name: str, shape: ModelShape) -> bool:
        if self.top_layers is None:
            return True
        layer = layer_of(name)
        return name != EMBEDDING_PARAMETER if layer is None else layer >= shape.num_layers - self.top_layers

    def first_layer(self, names: Iterable[str], shape: ModelShape, head: Head) -> int:
        """Return the first layer with a parameter that trains, given the names of all parameters: the layers before
        it are the frozen trunk. 0 if the embedding trains; the number of layers if no layer has such a parameter."""
        trained = [name for name in names if self.trains(name, shape, head)]
        if EMBEDDING_PARAMETER in trained:
            return 0
        layers = [layer for name in trained if (layer := layer_of(name)) is not None]
        return min(layers, default=shape.num_layers)


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
