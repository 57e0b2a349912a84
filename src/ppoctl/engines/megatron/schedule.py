"""Megatron-Core's forward-backward schedule over microbatches, with losses that are already over the global count.

What Megatron averages is undone here, in one place: the schedule divides a loss by the number of microbatches or by
a token count, and the gradient reduction by a token count. Our microbatch losses are sums over the minibatch's
global count, so their plain sum, over microbatches and ranks alike, is the minibatch's loss and gradient.
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

from ppoctl.engines.megatron.logprobs import FrozenOutputs, PositionOutputs
from ppoctl.engines.megatron.microbatches import Microbatch, RankOutputs
from ppoctl.engines.megatron.model import LogprobModel
from ppoctl.ports import TokenOutputs, concatenate_outputs

ModelChunks = Sequence[torch.nn.Module]
"""This rank's pipeline stages."""

LossOf = Callable[[Microbatch, TokenOutputs], Float[Tensor, ""]]
"""The loss of a microbatch from what the model says of its rows."""


@dataclass(frozen=True)
class MicrobatchResult:
    """What a microbatch gave, on the CPU."""

    said: TokenOutputs
    loss: float = 0.0


def run_forward(stages: ModelChunks, microbatches: Sequence[Microbatch]) -> list[MicrobatchResult]:
    """What the model says about each microbatch, on the last pipeline stage (elsewhere nothing); no gradient."""

    def collect(microbatch: Microbatch, outputs: PositionOutputs, **_: bool) -> MicrobatchResult:
        return MicrobatchResult(_on_grid(microbatch, outputs))

    with torch.no_grad():
        return _run(stages, microbatches, collect)


def run_forward_backward(
    stages: ModelChunks, microbatches: Sequence[Microbatch], loss_of: LossOf
) -> list[MicrobatchResult]:
    """What the model says about each microbatch, as `run_forward`; the gradient of the summed losses is left in the
    model's gradient buffers, reduced over all ranks."""

    def loss_func(microbatch: Microbatch, outputs: PositionOutputs) -> tuple[Tensor, Tensor, MicrobatchResult]:
        said = _on_grid(microbatch, outputs)
        loss = 0.0 * outputs.outputs.sum() if microbatch.is_idle else loss_of(microbatch, said)
        found = MicrobatchResult(said.map(Tensor.detach), float(loss.detach()))
        # The middle entry is the token count to divide by; 0 is Megatron-Core's "do not divide".
        return loss, torch.zeros((), dtype=torch.int), found

    return _run(stages, microbatches, loss_func, backward=True)


def with_reference(stages: Sequence[LogprobModel], microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """The microbatches, each with what a frozen model says of its positions up to the output layer; the hidden states
    of all of them are then in memory, on the last pipeline stage."""

    def collect(_: Microbatch, hidden: Tensor, **__: bool) -> Tensor:
        return hidden

    with torch.no_grad():
        up_to_there = [replace(one, input=replace(one.input, hidden_alone=True)) for one in microbatches]
        found: list[Tensor] = _run(stages, up_to_there, collect)
    if not found:  # another pipeline rank reads them
        return list(microbatches)
    frozen = [FrozenOutputs(hidden, stages[-1].output_weight) for hidden in found]
    return [
        replace(one, input=replace(one.input, reference=of_it))
        for one, of_it in zip(microbatches, frozen, strict=True)
    ]


def share_of(microbatches: Sequence[Microbatch], found: Sequence[MicrobatchResult]) -> RankOutputs:
    """What was found about the microbatches as one share."""
    places = torch.cat([microbatch.places for microbatch in microbatches])
    return RankOutputs(places, concatenate_outputs([one.said for one in found]))


def reduce_gradients(model: list[torch.nn.Module], _: Tensor | None, **settings: Any) -> None:
    """For `finalize_model_grads_func`: Megatron-Core's reduction over ranks without its division by a token count."""
    finalize_model_grads(model, None, **settings)


def _run(
    stages: ModelChunks, microbatches: Sequence[Microbatch], loss_func: Callable[..., Any], *, backward: bool = False
) -> list[Any]:
    def forward_step(data: Iterator[Microbatch], stage: torch.nn.Module) -> tuple[Any, Any]:
        microbatch = next(data)
        return stage(microbatch.input), partial(loss_func, microbatch)

    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        # Interleaved stages each go through all microbatches.
        data_iterator=[iter(microbatches) for _ in stages] if len(stages) > 1 else iter(microbatches),
        model=list(stages),
        num_microbatches=len(microbatches),
        seq_length=max(microbatch.input.tokens.numel() for microbatch in microbatches),
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )
    return collected


def _on_grid(microbatch: Microbatch, outputs: PositionOutputs) -> TokenOutputs:
    def on_grid(values: Float[Tensor, " n"]) -> Float[Tensor, "m R"]:
        if microbatch.is_idle:
            return torch.zeros(0, microbatch.packed.num_columns)
        # On the CPU: grids are small, and objectives close over data that live there.
        return microbatch.packed.to_grid(values.cpu())

    entropy, full_kl = (None if of is None else on_grid(of) for of in (outputs.entropy, outputs.full_kl))
    return TokenOutputs(on_grid(outputs.outputs), entropy, full_kl)
