"""Log-probs and entropy of tokens from hidden states, without ever holding tokens x vocabulary.

Letters: n positions, V vocabulary. Logits exist for one chunk of positions at a time, in the model's dtype; the
float32 arithmetic on them runs over a few rows at a time. Backward recomputes each chunk's logits (the last chunk,
still at hand, is not recomputed), turns them into their own gradient in place, and goes on.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Logits taken to float32 at a time: what stays in a core's cache on CPU, what keeps a GPU busy."""

_BAND_ELEMENTS = 2**22
"""Weight-gradient numbers in the model's dtype at a time, on their way to a float32 buffer."""


class LogprobSettings(NamedTuple):
    """How the output layer is read."""

    temperature: float
    """Divides the logits."""
    chunk_tokens: int
    """Positions whose logits exist at one time."""
    with_entropy: bool
    """Without it the entropy returned is 0 and has no gradient."""


def token_logprobs(
    hidden: Float[Tensor, "n hidden"],
    weight: Float[Tensor, "V hidden"],
    targets: Int[Tensor, " n"],
    settings: LogprobSettings,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """log p(target) of each position, and the entropy of its distribution (nats); float32, both differentiable.

    p = softmax(hidden @ weight^T / temperature). Where `weight` has a `main_grad` (Megatron-Core's float32 gradient
    buffer) its gradient is added there chunk by chunk, in float32, and not returned to autograd; a gradient that
    other uses of a tied weight return is added by Megatron-Core's hook as usual.

    A vocabulary split over ranks will need the two sums and the maximum of `_statistics` reduced over them.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, settings)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: LogprobSettings
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_z = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        logits = hidden.new_empty(min(settings.chunk_tokens, len(hidden)), len(weight))
        for chunk in _slices(len(hidden), settings.chunk_tokens):
            torch.mm(hidden[chunk], weight.t(), out=logits[: chunk.stop - chunk.start])
            for rows, block in _blocks(logits, chunk):
                logprobs[rows], entropy[rows], log_z[rows] = _statistics(block, targets[rows], settings)
        ctx.save_for_backward(hidden, weight, targets, entropy, log_z)
        ctx.settings = settings
        ctx.last_logits = logits
        if not settings.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets, entropy, log_z = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        main_grad: Any = getattr(weight, "main_grad", None)
        needed = ctx.needs_input_grad[1]
        returned = torch.zeros_like(weight) if needed and main_grad is None else None
        grad_weight: Tensor = main_grad if returned is None else returned
        logits, ctx.last_logits = ctx.last_logits, None
        for chunk in reversed(_slices(len(hidden), ctx.settings.chunk_tokens)):
            grad_logits = logits[: chunk.stop - chunk.start]
            if chunk.stop != len(hidden):
                torch.mm(hidden[chunk], weight.t(), out=grad_logits)
            for rows, block in _blocks(logits, chunk):
                d_entropy = grad_entropy[rows] if ctx.settings.with_entropy else None
                position = _Position(targets[rows], log_z[rows], entropy[rows], grad_logprobs[rows], d_entropy)
                block.copy_(_grad_of_logits(block, position, ctx.settings.temperature))
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if needed:
                _accumulate(grad_weight, grad_logits, hidden[chunk])
        return grad_hidden, returned, None, None


class _Position(NamedTuple):
    """What backward knows about some positions."""

    targets: Tensor
    log_z: Tensor
    entropy: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor | None


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _blocks(logits: Tensor, chunk: slice) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a chunk, few at a time: where they are among all positions, and their logits."""
    rows = max(1, _BLOCK_ELEMENTS[logits.device.type] // logits.shape[1])
    for part in _slices(chunk.stop - chunk.start, rows):
        yield slice(chunk.start + part.start, chunk.start + part.stop), logits[part]


def _statistics(logits: Tensor, targets: Tensor, settings: LogprobSettings) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and log of the normaliser, of each row; float32."""
    x = _scaled(logits, settings.temperature)
    peak = x.amax(-1, keepdim=True)
    x.sub_(peak)
    picked = x.gather(1, targets[:, None])[:, 0]
    if settings.with_entropy:
        e = x.exp()
        z = e.sum(-1)
        entropy = z.log() - e.mul_(x).sum(-1) / z
    else:
        z = x.exp_().sum(-1)
        entropy = torch.zeros_like(z)
    log_z = z.log()
    return picked - log_z, entropy, log_z + peak[:, 0]


def _grad_of_logits(logits: Tensor, at: _Position, temperature: float) -> Tensor:
    """With p the probabilities: d log p(t) / dx_v = [v = t] - p_v, and dH / dx_v = -p_v (log p_v + H)."""
    log_p = _scaled(logits, temperature).sub_(at.log_z[:, None])
    if at.grad_entropy is None:
        grad = log_p.exp_().mul_(-at.grad_logprob[:, None])
    else:
        p = log_p.exp()
        slope = log_p.add_(at.entropy[:, None]).mul_(-at.grad_entropy[:, None]).sub_(at.grad_logprob[:, None])
        grad = p.mul_(slope)
    grad.scatter_add_(1, at.targets[:, None], at.grad_logprob[:, None])
    return grad if temperature == 1.0 else grad.div_(temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy, divided by the temperature."""
    x = logits.to(torch.float32, copy=True)
    return x if temperature == 1.0 else x.div_(temperature)


def _accumulate(grad_weight: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """grad_weight += grad_logits^T @ hidden; in its own precision, a band of the vocabulary at a time where the
    product has to be cast (torch has no mixed-precision addmm), so that the product stays small."""
    if grad_weight.dtype == hidden.dtype:
        grad_weight.addmm_(grad_logits.t(), hidden)
        return
    band = max(1, _BAND_ELEMENTS // hidden.shape[1])
    for ids in _slices(len(grad_weight), band):
        grad_weight[ids].add_(grad_logits[:, ids].t() @ hidden)
