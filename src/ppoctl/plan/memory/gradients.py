"""Parameters of a layer that have a gradient: those that train, and frozen projections with an adapter.

A product keeps its input only for the gradient of its weight, and a norm on a CPU keeps its normalized input only for
that. Other kept activations do not depend on what trains.

Each adapter of rank r keeps r numbers per token, A x, and a copy of its matrix A. While the adapters of a linear
layer compute, its output exists in three copies: its own, by projection, and in Megatron's order
(`engines.megatron.low_rank`).
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ppoctl.models.convert.adapters import Adapter, adapters
from ppoctl.models.convert.tensor_mapping import FusedPart
from ppoctl.models.head import VALUE_HEAD_PREFIX
from ppoctl.models.model import Model


@lru_cache(maxsize=64)
def gradients_of(model: Model) -> "LayerGradients":
    """Return the gradients of a model. The object remembers what it has computed."""
    return LayerGradients(model)


@dataclass(frozen=True)
class AdapterSizes:
    """Numbers of the adapters of attention or of the MLP in one layer, on one tensor rank."""

    per_token: int = 0
    """Rows A x of projections that are split by outputs, for each token."""
    per_own_token: int = 0
    """Rows A x of the other projections, for each token that a rank has between layers."""
    copied: int = 0
    """Elements of all matrices A."""
    widest: int = 0
    """Output of the widest linear layer with adapters, for each token."""


class LayerGradients:
    """Parameters with a gradient, and adapters, layer by layer."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._adapters = defaultdict[int | None, list[Adapter]](list)
        for adapter in adapters(model.shape, model.trainable):
            self._adapters[adapter.base.layer].append(adapter)
        self._known: dict[tuple[int, str], bool] = {}
        self._sizes: dict[tuple[int, bool, int], AdapterSizes] = {}

    def has(self, layer: int, name: str) -> bool:
        """Return whether a parameter trains or has an adapter, in this layer or in a copy of it in a value head.
        `name`: its name in a layer, as in the family tables."""
        if (layer, name) not in self._known:
            names = [f"decoder.layers.{layer}.{name}"]
            if layer in (copies := self._model.copied_layers):
                names.append(f"{VALUE_HEAD_PREFIX}layers.{copies.index(layer)}.{name}")
            adapted = {adapter.base.parameter for adapter in self._adapters[layer]}
            self._known[layer, name] = any(each in adapted or self._trains(each) for each in names)
        return self._known[layer, name]

    def _trains(self, name: str) -> bool:
        experts = self._model.shape.experts
        if "{expert}" not in name or experts is None or not self._model.trainable.freeze:
            return self._model.trains(name)
        names = (name.replace("{expert}", str(expert)) for expert in range(experts.count))
        return any(map(self._model.trains, names))

    def adapters(self, layer: int, ranks: int, *, in_mlp: bool) -> AdapterSizes:
        """Return the sizes of the adapters of a layer on one of several tensor ranks."""
        key = (layer, in_mlp, ranks)
        if key not in self._sizes:
            parts = [each for each in self._adapters[layer] if (".mlp." in each.base.parameter) == in_mlp]
            self._sizes[key] = AdapterSizes(
                sum(each.a.shape[0] for each in parts if each.base.split == 0),
                sum(each.a.shape[0] for each in parts if each.base.split != 0),
                sum(prod(each.a.shape) // (1 if each.a.split is None else ranks) for each in parts),
                max((self._output(each) // (ranks if each.base.split == 0 else 1) for each in parts), default=0),
            )
        return self._sizes[key]

    def _output(self, adapter: Adapter) -> int:
        """Return the size of the output of the linear layer that contains an adapted projection."""
        if adapter.base.place in (FusedPart.QUERY, FusedPart.KEY, FusedPart.VALUE):
            return self._model.shape.query_channels + 2 * self._model.shape.key_channels
        return adapter.base.shape[0] * (2 if adapter.base.place in (FusedPart.GATE, FusedPart.UP) else 1)
