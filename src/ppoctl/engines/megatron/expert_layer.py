"""Transformer layer with experts, whose router knows the microbatch that it routes."""

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ppoctl.engines.megatron.packed_input import PackedInput


class ExpertLayer(TransformerLayer):
    """Transformer layer that gives the microbatch to its router.

    If the activations of experts are recomputed, the router runs again in the backward pass of a microbatch, when
    other microbatches have passed the layer. The recomputed function therefore holds its own microbatch, which that
    of Megatron-Core's `MoELayer` does not.
    """

    packed: PackedInput | None = None
    """Microbatch of the current pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recomputes_experts = self.mlp.moe_layer_recompute
        self.mlp.moe_layer_recompute = False

    def forward(self, *args: Any, packed_seq_params: PackedInput, **kwargs: Any) -> Any:
        self.packed = packed_seq_params
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self.packed = None

    def _forward_mlp(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        packed, forward_mlp = self.packed, super()._forward_mlp

        def run(hidden_states: Tensor) -> Tensor:
            self.mlp.router.packed = packed
            try:
                output: Tensor = forward_mlp(hidden_states)
                return output
            finally:
                self.mlp.router.packed = None

        # Layers of a frozen trunk keep no activations, so nothing repeats their pass, which would not be counted.
        if not self.recomputes_experts or not hidden_states.requires_grad:
            return run(hidden_states)
        output: Tensor = tensor_parallel.checkpoint(run, False, hidden_states)  # noqa: FBT003 - by position
        return output
