"""Megatron-Core's forward-backward schedule over microbatches, with losses that are already over the global count.

What Megatron averages is undone here, in one place: the schedule divides a loss by the number of microbatches or by
a token count, and the gradient reduction by a token count. Our microbatch losses are sums over the minibatch's
global count, so their plain sum, over microbatches and ranks alike, is the minibatch's loss and gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ppoctl.engines.megatron.microbatches import Microbatch, gather_grids
from ppoctl.engines.megatron.model import TokenOutputs

LossOf = Callable[[Microbatch, "Collected"], Float[Tensor, ""]]
"""The loss of a microbatch from its outputs on the grid."""


@dataclass(frozen=True)
class Collected:
    """Outputs of some rows on the response grid, on the CPU; 0 where not present."""

    outputs: Float[Tensor, "m R"]
    entropy: Float[Tensor, "m R"] | None
    loss: float | None = None
    """The sum over the microbatches, where a loss was asked for."""


def run_forward(model: torch.nn.Module, microbatches: Sequence[Microbatch]) -> Collected:
    """What the model says about the rows, in the order they were cut from; no gradient."""

    def collect(microbatch: Microbatch, outputs: TokenOutputs, **_: bool) -> Collected:
        return _on_grid(microbatch, outputs)

    with torch.no_grad():
        return _joined(microbatches, _run(model, microbatches, collect))


def run_forward_backward(model: torch.nn.Module, microbatches: Sequence[Microbatch], loss_of: LossOf) -> Collected:
    """The same, leaving the gradient of the summed losses in the model's gradient buffers."""

    def loss_func(microbatch: Microbatch, outputs: TokenOutputs) -> tuple[Tensor, Tensor, Collected]:
        found = _on_grid(microbatch, outputs)
        loss = loss_of(microbatch, found)
        entropy = None if found.entropy is None else found.entropy.detach()
        # The middle entry is the token count to divide by; 0 is Megatron-Core's "do not divide".
        return (
            loss,
            torch.zeros((), dtype=torch.int),
            Collected(found.outputs.detach(), entropy, float(loss.detach())),
        )

    return _joined(microbatches, _run(model, microbatches, loss_func, backward=True))


def reduce_gradients(model: list[torch.nn.Module], _: Tensor | None, **settings: Any) -> None:
    """For `finalize_model_grads_func`: Megatron-Core's reduction over ranks without its division by a token count."""
    finalize_model_grads(model, None, **settings)


def _run(
    model: torch.nn.Module,
    microbatches: Sequence[Microbatch],
    loss_func: Callable[..., Any],
    *,
    backward: bool = False,
) -> list[Collected]:
    def forward_step(data: Iterator[Microbatch], stage: torch.nn.Module) -> tuple[Any, Any]:
        microbatch = next(data)
        return stage(microbatch.input), partial(loss_func, microbatch)

    collected: list[Collected] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=max(microbatch.packed.tokens.numel() for microbatch in microbatches),
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )
    return collected


def _on_grid(microbatch: Microbatch, outputs: TokenOutputs) -> Collected:
    # On the CPU: grids are small, and objectives close over data that live there.
    to_grid = microbatch.packed.to_grid
    entropy = None if outputs.entropy is None else to_grid(outputs.entropy.cpu())
    return Collected(to_grid(outputs.outputs.cpu()), entropy)


def _joined(microbatches: Sequence[Microbatch], collected: Sequence[Collected]) -> Collected:
    entropies = [one.entropy for one in collected if one.entropy is not None]
    losses = [one.loss for one in collected if one.loss is not None]
    return Collected(
        outputs=gather_grids(microbatches, [one.outputs for one in collected]),
        entropy=gather_grids(microbatches, entropies) if entropies else None,
        loss=sum(losses) if losses else None,
    )
