"""Megatron-Core's forward-backward schedule over microbatches, with losses already divided by the global token count.

Only this module undoes Megatron's averaging. Megatron's schedule divides a loss by the number of microbatches or by a
token count, and its gradient reduction divides by a token count. Our microbatch losses are already divided by the
minibatch's global token count. The loss of the minibatch is therefore the sum of these losses over microbatches and
ranks, and its gradient is the sum of their gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ppoctl.core.ports import TokenOutputs, concatenate_outputs
from ppoctl.engines.megatron.megatron_model import LogprobModel
from ppoctl.engines.megatron.microbatches import Microbatch, RankExperts, RankOutputs
from ppoctl.engines.megatron.output_logprobs import FrozenOutputs, PositionOutputs
from ppoctl.engines.megatron.router import forget_step_loads, own_tokens

ModelChunks = Sequence[torch.nn.Module]
"""This rank's pipeline stages."""

LossOf = Callable[[Microbatch, TokenOutputs], Float[Tensor, ""]]
"""Computes the loss of a microbatch from the model's outputs for its rows."""


@dataclass(frozen=True)
class MicrobatchResult:
    """Result of a microbatch, on the CPU."""

    outputs: TokenOutputs
    loss: float = 0.0


def run_forward(stages: ModelChunks, microbatches: Sequence[Microbatch]) -> list[MicrobatchResult]:
    """Return the model's outputs for each microbatch, on the last pipeline stage. Other stages return an empty list.
    Computes no gradient."""

    def collect(microbatch: Microbatch, outputs: PositionOutputs, **_: bool) -> MicrobatchResult:
        return MicrobatchResult(_on_grid(microbatch, outputs))

    with torch.no_grad():
        return _run(stages, microbatches, collect)


def run_forward_backward(
    stages: ModelChunks, microbatches: Sequence[Microbatch], loss_of: LossOf
) -> list[MicrobatchResult]:
    """Return the model's outputs for each microbatch, like `run_forward`. Afterwards, the model's gradient buffers
    contain the gradient of the summed losses, reduced over all ranks."""

    def loss_func(microbatch: Microbatch, outputs: PositionOutputs) -> tuple[Tensor, Tensor, MicrobatchResult]:
        token_outputs = _on_grid(microbatch, outputs)
        loss = _zero_loss(outputs) if microbatch.is_idle else loss_of(microbatch, token_outputs)
        result = MicrobatchResult(token_outputs.map(Tensor.detach), float(loss.detach()))
        # The middle entry is the token count by which Megatron-Core divides. With 0, it does not divide.
        return loss, torch.zeros((), dtype=torch.int), result

    forget_step_loads(stages)
    return _run(stages, microbatches, loss_func, backward=True)


def with_reference(stages: Sequence[LogprobModel], microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """Return the microbatches, each with the reference's hidden states before the output layer. On the last pipeline
    stage, the hidden states of all microbatches are then in memory together. The pass runs through all layers, also
    through a trunk whose weights are those of the model."""

    def collect(_: Microbatch, hidden: Tensor, **__: bool) -> Tensor:
        return hidden

    with torch.no_grad():
        up_to_output = [
            replace(batch, input=batch.input.without_experts().replaced(hidden_alone=True)) for batch in microbatches
        ]
        hidden_states: list[Tensor] = _run(stages, up_to_output, collect)
    if not hidden_states:  # another pipeline rank has them
        return list(microbatches)
    frozen = [FrozenOutputs(hidden, stages[-1].output_weight) for hidden in hidden_states]
    return [
        replace(batch, input=batch.input.replaced(reference=reference))
        for batch, reference in zip(microbatches, frozen, strict=True)
    ]


def total_loss(loss: float, device: torch.device, *, counts: bool) -> float:
    """Return the sum of the losses of all data ranks, on every rank, so that either all ranks take the step or none.
    `counts`: whether this rank is the one whose loss counts among the ranks that share its rows."""
    world = torch.distributed.group.WORLD
    if torch.distributed.get_world_size(world) == 1:
        return loss
    total = torch.tensor(loss if counts else 0.0, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total, group=world)
    return float(total)


def share_of(microbatches: Sequence[Microbatch], found: Sequence[MicrobatchResult]) -> RankOutputs:
    """Return the results of all microbatches as the outputs of this rank."""
    places = torch.cat([microbatch.places for microbatch in microbatches])
    return RankOutputs(places, concatenate_outputs([result.outputs for result in found]))


def experts_of(
    microbatches: Sequence[Microbatch], tensor_ranks: torch.distributed.ProcessGroup, *, is_split: bool
) -> RankExperts:
    """Return the experts that the routers of this rank chose in forward passes of these microbatches. `is_split`:
    whether tensor ranks route different tokens. Otherwise only the first returns experts."""
    returns = is_split or tensor_ranks.rank() == 0
    inputs = [microbatch.input for microbatch in microbatches if returns and not microbatch.is_idle]
    at = [own_tokens(each.at, tensor_ranks) if is_split else each.at for each in inputs]
    chosen = [each.chosen or {} for each in inputs]
    kept = [index >= 0 for index in at]
    layers = {
        layer: torch.cat([one[layer][is_kept] for one, is_kept in zip(chosen, kept, strict=True)]).short().cpu()
        for layer in (chosen[0] if chosen else {})
    }
    places = [index[is_kept] for index, is_kept in zip(at, kept, strict=True)]
    return RankExperts(torch.cat(places or [torch.zeros(0, dtype=torch.int64)]).cpu(), layers)


def reduce_gradients(model: list[torch.nn.Module], _: Tensor | None, **settings: Any) -> None:
    """Reduce gradients over ranks as Megatron-Core does, but without dividing by a token count
    (`finalize_model_grads_func`)."""
    finalize_model_grads(model, None, **settings)


def _run(
    stages: ModelChunks, microbatches: Sequence[Microbatch], loss_func: Callable[..., Any], *, backward: bool = False
) -> list[Any]:
    def forward_step(data: Iterator[Microbatch], stage: torch.nn.Module) -> tuple[Any, Any]:
        microbatch = next(data)
        return stage(microbatch.input), partial(loss_func, microbatch)

    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        # Each interleaved stage processes all microbatches.
        data_iterator=[iter(microbatches) for _ in stages] if len(stages) > 1 else iter(microbatches),
        model=list(stages),
        num_microbatches=len(microbatches),
        seq_length=max(microbatch.input.tokens.numel() for microbatch in microbatches),
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )
    return collected


def _zero_loss(outputs: PositionOutputs) -> Float[Tensor, ""]:
    """Return 0 with the graph of all layers, whose backward other ranks wait for."""
    values = 0.0 if outputs.values is None else outputs.values.sum()
    return 0.0 * (outputs.outputs.sum() + values)


def _on_grid(microbatch: Microbatch, outputs: PositionOutputs) -> TokenOutputs:
    def on_grid(values: Float[Tensor, " n"]) -> Float[Tensor, "m R"]:
        if microbatch.is_idle:
            return torch.zeros(0, microbatch.packed.num_columns)
        # The grid is on the CPU: grids are small, and objectives use other data on the CPU.
        return microbatch.packed.to_grid(values.cpu())

    entropy, full_kl, values = (
        None if output is None else on_grid(output) for output in (outputs.entropy, outputs.full_kl, outputs.values)
    )
    return TokenOutputs(on_grid(outputs.outputs), entropy, full_kl, values)
