"""The hidden states that enter a layer, where a second top of the model branches off: a reference's or a value
head's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor


@contextmanager
def captured_input(stage: GPTModel, index: int) -> Iterator[list[Tensor]]:
    """Context with a list to which each forward pass of the stage appends the hidden states `[N, 1, hidden]` that
    enter its layer `index` (counted within the stage; the number of layers: the final norm). With gradients, the
    captured tensor is part of the graph."""
    captured: list[Tensor] = []

    def capture(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        captured.append(named["hidden_states"] if "hidden_states" in named else arguments[0])

    layers = stage.decoder.layers
    module = layers[index] if index < len(layers) else stage.decoder.final_layernorm
    handle = module.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        yield captured
    finally:
        handle.remove()
