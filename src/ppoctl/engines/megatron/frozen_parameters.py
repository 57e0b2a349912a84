"""Frozen parameters of a pipeline stage: they get no gradient, and Megatron-Core's gradient buffers and optimizer
leave them out.

The frozen trunk consists of the embedding and the layers before the first layer with a parameter that trains. No
gradient passes through the trunk, so the trunk keeps no activations.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from megatron.core.tensor_parallel import ColumnParallelLinear, checkpoint
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from ppoctl.engines.megatron.megatron_model import PackedModel
from ppoctl.engines.megatron.parameter_shards import names_in_whole_model, sent_parts
from ppoctl.models.convert.adapters import trunk_layers
from ppoctl.models.convert.checksum import TensorChecksum, checksum_of
from ppoctl.models.convert.tensors import frozen_names


def trained_names(stage: PackedModel) -> set[str]:
    """Return the names, within the stage, of the parameters that train."""
    model = stage.settings.model
    return {name for name, whole in names_in_whole_model(stage).items() if model.trains(whole)}


def freeze(stage: PackedModel) -> None:
    """Freeze all parameters of the stage that do not train. This must precede the wrapper with gradient buffers."""
    if stage.settings.model.trainable.is_all:
        return
    trained = trained_names(stage)
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in trained)
    for module in stage.modules():
        if isinstance(module, ColumnParallelLinear) and module.bias is not None and not module.weight.requires_grad:
            _keep_gradient_of_bias(module)
    decoder, trunk = stage.decoder, trunk_layers(stage.settings.model) - stage.first_layer
    if trunk > 0:
        decoder.register_forward_pre_hook(_detach_input)
    if 0 <= trunk < len(decoder.layers):
        decoder.layers[trunk].register_forward_pre_hook(_require_gradient, with_kwargs=True)
        decoder._checkpointed_forward = partial(_recomputed_after_trunk, decoder, trunk)


def frozen_checksums(stages: Sequence[PackedModel]) -> dict[str, TensorChecksum]:
    """Return the checksum of each frozen Hugging Face tensor of these pipeline stages, on the first tensor and data
    rank; other ranks return nothing. Collective over all tensor and expert ranks."""
    found: dict[str, TensorChecksum] = {}
    for stage in stages:
        frozen, groups = set(frozen_names(stage.settings.model)), stage.pg_collection
        is_first = groups.tp.rank() == groups.dp_cp.rank() == 0
        for part in sent_parts(stage):
            if part.name in frozen:
                whole = part.read(groups)
                found |= {part.name: checksum_of(whole)} if is_first else {}
    return found


def _keep_gradient_of_bias(linear: ColumnParallelLinear) -> None:
    """Add the bias outside of Megatron-Core's product with a frozen weight, which returns no gradient of the bias."""
    product = linear._forward_impl

    def with_bias(*, bias: Tensor | None, **inputs: Any) -> Tensor:
        output: Tensor = product(bias=None, **inputs)
        return output if bias is None else output + bias

    linear._forward_impl = with_bias


def _detach_input(decoder: TransformerBlock, _: Any) -> None:
    """Detach the hidden states from the previous pipeline stage. Their gradient is zero, and is set now: the schedule
    sends it to the previous stage, which would wait for it otherwise."""
    received = decoder.input_tensor
    if received is not None and torch.is_grad_enabled():
        received.grad = torch.zeros_like(received)
        decoder.set_input_tensor(received.detach())


def _require_gradient(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Make the hidden states that leave the trunk require a gradient. Otherwise parameters inside of a recomputed
    part of this layer would get no gradient, and expert ranks could disagree on whether tokens have a gradient."""
    hidden = named["hidden_states"]
    return arguments, {**named, "hidden_states": _with_gradient(hidden) if torch.is_grad_enabled() else hidden}


def _recomputed_after_trunk(
    decoder: TransformerBlock,
    trunk: int,
    *,
    hidden_states: Float[Tensor, "N 1 hidden"],
    attention_mask: None,
    packed_seq_params: Any,
    **_: Any,
) -> Float[Tensor, "N 1 hidden"]:
    """Return the output of the layers, of which those after the trunk are recomputed in the backward pass.

    This replaces Megatron-Core's function, which would also wrap the trunk. It would compute no gradient in the first
    layer that trains, because the input of that layer needs none.
    """

    def through(layer: torch.nn.Module, hidden: Tensor) -> Tensor:
        output: Tensor = layer(
            hidden_states=hidden, attention_mask=attention_mask, packed_seq_params=packed_seq_params
        )[0]
        return output

    for layer in decoder.layers[:trunk]:
        hidden_states = through(layer, hidden_states)
    if torch.is_grad_enabled():
        hidden_states = _with_gradient(hidden_states)
    for layer in decoder.layers[trunk:]:
        hidden_states = checkpoint(partial(through, layer), False, hidden_states)  # noqa: FBT003 - by position only
    return hidden_states


def _with_gradient(hidden: Tensor) -> Tensor:
    """Return the hidden states as a tensor that requires a gradient."""
    return hidden if hidden.requires_grad else hidden.detach().requires_grad_()
