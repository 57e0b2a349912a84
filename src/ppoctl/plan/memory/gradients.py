"""Parameters of a layer that have a gradient: those that train, and frozen projections with an adapter.

A product keeps its input only for the gradient of its weight, and a norm on a CPU keeps its normalized input only for
that. Other kept activations do not depend on what trains.
"""

from functools import lru_cache

from ppoctl.convert.adapters import adapters
from ppoctl.model.head import VALUE_HEAD_PREFIX, Head, SharedValueHead
from ppoctl.model.shape import ModelShape
from ppoctl.model.trainable import Trainable
from ppoctl.plan.memory.parameters import copied_layers


@lru_cache(maxsize=64)
def gradients_of(
    shape: ModelShape, head: Head, trainable: Trainable, value_head: SharedValueHead | None
) -> "LayerGradients":
    """Return the gradients of a model, which remember what they have computed."""
    return LayerGradients(shape, head, trainable, value_head)


class LayerGradients:
    """Parameters with a gradient, and sizes of adapters, layer by layer."""

    def __init__(
        self, shape: ModelShape, head: Head, trainable: Trainable, value_head: SharedValueHead | None
    ) -> None:
        self._shape, self._head, self._trainable = shape, head, trainable
        self._copies = copied_layers(shape, value_head)
        self._adapted: dict[int, list[str]] = {}
        for adapter in adapters(shape, trainable):
            assert adapter.base.layer is not None, "only projections of layers have adapters"
            self._adapted.setdefault(adapter.base.layer, []).append(adapter.base.parameter)
        self._known: dict[tuple[int, str], bool] = {}

    def has(self, layer: int, name: str) -> bool:
        """Return whether the parameter of this name in a layer, as in the family tables, trains or has an adapter,
        in this layer or in a copy of it in a value head."""
        if (layer, name) not in self._known:
            names = [f"decoder.layers.{layer}.{name}"]
            if layer in self._copies:
                names.append(f"{VALUE_HEAD_PREFIX}layers.{self._copies.index(layer)}.{name}")
            self._known[layer, name] = any(
                each in self._adapted.get(layer, ()) or self._trains(each) for each in names
            )
        return self._known[layer, name]

    def _trains(self, name: str) -> bool:
        experts = self._shape.experts
        if "{expert}" not in name or experts is None or not self._trainable.freeze:
            return self._trainable.trains(name, self._shape, self._head)
        names = (name.replace("{expert}", str(expert)) for expert in range(experts.count))
        return any(self._trainable.trains(each, self._shape, self._head) for each in names)

    def kept_by_adapters(self, layer: int) -> tuple[int, int]:
        """Return the numbers per token that the adapters of a layer keep, the products A x: those of attention, and
        those of the MLP."""
        lora, of_layer = self._trainable.lora, self._adapted.get(layer, [])
        if lora is None:
            return 0, 0
        in_mlp = sum(".mlp." in parameter for parameter in of_layer)
        return lora.rank * (len(of_layer) - in_mlp), lora.rank * in_mlp
