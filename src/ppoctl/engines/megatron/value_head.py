"""The value head on the policy's model, on the last pipeline stage: own copies of the last layers and of the final
norm, if there are any, and then the layers of the head.

                       entering hidden states  ->  last n layers, final norm         ->  output layer  ->  log-probs
                                               ->  copies of both -> read positions  ->  head          ->  values
    without copies:    hidden states that the output layer reads                     ->  head          ->  values

Each tensor rank has a copy of the head, and computes the same values from all positions to read, so the gradient of
the head is complete on each rank without communication. Even an mlp has few parameters (2 hidden x hidden, as an
output layer of 2 hidden ids), so splitting it would save little memory. The copied layers are split like the layers
of the model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from ppoctl.engines.megatron.layer_spec import layer_spec
from ppoctl.engines.megatron.packed_input import PackedInput
from ppoctl.models.head import SharedValueHead
from ppoctl.models.shape import ModelShape

_SEED = 20171
"""Seed of the initial weights of an mlp. They are a part of no recipe, so a change of this number would change the
results of recipes that are equal."""


class PolicyValueHead(TransformerBlock):
    """A value head, whose copied layers are the layers of a `TransformerBlock`."""

    def __init__(
        self,
        head: SharedValueHead,
        shape: ModelShape,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        virtual_stage: int | None,
    ) -> None:
        layers = range(shape.num_layers - head.layers_copied, shape.num_layers)
        spec = layer_spec(shape, layers) if head.layers_copied else TransformerBlockSubmodules(layer_specs=[])
        super().__init__(config, spec, pre_process=False, pg_collection=groups, vp_stage=virtual_stage)
        hidden = config.hidden_size
        self.hidden_layer = torch.nn.Linear(hidden, 2 * hidden) if head.kind == "mlp" else None
        self.output_layer = (
            torch.nn.Linear(hidden, 1, bias=False) if self.hidden_layer is None else torch.nn.Linear(2 * hidden, 1)
        )

    @torch.no_grad()
    def start(self, decoder: TransformerBlock) -> None:
        """Set the initial weights: the copies equal the last layers of `decoder`, and the first values are 0."""
        for copied, layer in zip(self.layers, decoder.layers[len(decoder.layers) - len(self.layers) :], strict=True):
            copied.load_state_dict(layer.state_dict())
        if self.final_layernorm is not None:
            self.final_layernorm.load_state_dict(decoder.final_layernorm.state_dict())
        for parameter in self.output_layer.parameters():
            parameter.zero_()
        if self.hidden_layer is not None:
            weight = self.hidden_layer.weight
            drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(_SEED), device="cpu")
            weight.copy_((2 * drawn - 1) / weight.shape[1] ** 0.5)
            self.hidden_layer.bias.zero_()

    def after_copied_layers(
        self, entering: Float[Tensor, "S 1 hidden"], packed: PackedInput
    ) -> Float[Tensor, "S 1 hidden"]:
        """Return the hidden states after the copied layers and norm, given those that enter the first of them."""
        if torch.is_grad_enabled() and not entering.requires_grad:
            # Otherwise a recomputed layer after a frozen trunk would compute no gradient of its weights.
            entering = entering.detach().requires_grad_()
        self.set_input_tensor(entering)
        try:
            hidden: Tensor = self(None, None, packed_seq_params=packed)
        finally:
            self.set_input_tensor(None)  # otherwise the graph would stay in memory
        return hidden

    def values(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, " n"]:
        """Return the values of these hidden states, float32. The products are computed in float32."""
        hidden = hidden.float()
        if self.hidden_layer is not None:
            hidden = F.relu(F.linear(hidden, self.hidden_layer.weight.float(), self.hidden_layer.bias.float()))
        bias = self.output_layer.bias
        return F.linear(hidden, self.output_layer.weight.float(), None if bias is None else bias.float())[:, 0]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the tensors of a saved state. The copied layers are numbered from 0 in every layout, and each is a
        tensor of its own: Megatron-Core would store them as slices of a tensor for all layers of the model."""
        assert not sharded_offsets, "the value head belongs to no layer"
        state: dict[str, Any] = {}
        for number, layer in enumerate(self.layers):
            state |= layer.sharded_state_dict(f"{prefix}layers.{number}.", (), metadata)
        for name, module in self.named_children():
            if module is not self.layers:
                state |= sharded_state_dict_default(module, f"{prefix}{name}.", (), metadata, tp_group=self.tp_group)
        return state
