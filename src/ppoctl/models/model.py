"""A model as one description: its layers, the tops on them, and which of its parameters train.

    trunk      the first layers, if none of their parameters trains: their hidden states never change
    tops       the head (`token` or `value`); for a policy, also a value head, and a reference
    adapters   pairs of matrices beside projections, the only parameters of the layers that train (`Trainable.lora`)

The trainer builds from it, `plan` counts with it, and states and conversions select tensors by it. Names are those of
`trainable`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ppoctl.models.head import VALUE_HEAD_PREFIX, Head, SharedValueHead
from ppoctl.models.lora import adapted_parameter, is_adapter
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable import EMBEDDING_PARAMETER, EVERYTHING, OUTPUT_PARAMETER, Trainable, layer_of

ReferenceKind = Literal["own", "shared", "adapters_off"]
"""Weights of the frozen reference of a policy. own: all weights are its own. shared: those that train in the policy
are its own, and all others are the policy's. adapters_off: it has none, and is the policy without its adapters."""


@dataclass(frozen=True)
class Model:
    """The model of a trained role, of a reward model, or of a checkpoint. By default, all parameters train."""

    shape: ModelShape
    head: Head
    trainable: Trainable = EVERYTHING
    value_head: SharedValueHead | None = None
    """A value head on a policy's model, in addition to the token head."""
    reference: ReferenceKind | None = None
    """None: the model has no reference."""

    def trains(self, name: str) -> bool:
        """Return whether the parameter of this name trains."""
        trainable = self.trainable
        if name == OUTPUT_PARAMETER and self.head == "token" and self.shape.tied_embeddings:
            name = EMBEDDING_PARAMETER  # the copy of the embedding on the last pipeline rank
        if trainable.lora is None:
            return self._is_in_top(name) and not trainable.freezes(name)
        if is_adapter(name):
            return trainable.adapts(adapted_parameter(name))
        is_value_head = name.startswith(VALUE_HEAD_PREFIX) or (name == OUTPUT_PARAMETER and self.head == "value")
        return is_value_head and not trainable.freezes(name)

    def _is_in_top(self, name: str) -> bool:
        if self.trainable.top_layers is None:
            return True
        layer = layer_of(name)
        return name != EMBEDDING_PARAMETER if layer is None else layer >= self.num_layers - self.trainable.top_layers

    def first_layer(self, names: Iterable[str]) -> int:
        """Return the first layer with a parameter that trains, given the names of all parameters: the layers before
        it are the frozen trunk. 0 if the embedding trains; the number of layers if no layer has such a parameter."""
        trained = [name for name in names if self.trains(name)]
        if EMBEDDING_PARAMETER in trained:
            return 0
        layers = [layer for name in trained if (layer := layer_of(name)) is not None]
        return min(layers, default=self.num_layers)

    @property
    def num_layers(self) -> int:
        """Number of layers, without copies."""
        return self.shape.num_layers

    @property
    def copied_layers(self) -> tuple[int, ...]:
        """Layers of which the value head has copies."""
        copied = 0 if self.value_head is None else self.value_head.layers_copied
        return tuple(range(self.num_layers - copied, self.num_layers))


def reference_kind(trainable: Trainable, *, is_initial: bool) -> ReferenceKind:
    """Return the kind of the reference of a policy. `is_initial`: the reference is the model that the policy starts
    from. Only then, frozen weights of both are equal."""
    if not is_initial or trainable.is_all:
        return "own"
    return "shared" if trainable.lora is None else "adapters_off"
