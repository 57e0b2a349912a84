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
    softcap: float | None = None
    """c of c tanh(logit / c), before the temperature (Gemma 2); None: logits as they are."""


class VocabularyShard(NamedTuple):
    """Which rows of the output layer this rank has."""

    start: int
    """Id of the first."""
    total: int
    """Ids of the model; rows for higher ones are padding and not read."""
    group: torch.distributed.ProcessGroup | None
    """The ranks that have the others; None: there are none."""

    def rows(self, weight: Tensor) -> int:
        """Rows of `weight` that stand for an id."""
        return max(0, min(len(weight), self.total - self.start))

    @property
    def is_split(self) -> bool:
        return self.group is not None and self.group.size() > 1


def token_logprobs(
    hidden: Float[Tensor, "n hidden"],
    weight: Float[Tensor, "V hidden"],
    targets: Int[Tensor, " n"],
    settings: LogprobSettings,
    vocabulary: VocabularyShard | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """log p(target) of each position, and the entropy of its distribution (nats); float32, both differentiable.

    p = softmax(cap(hidden @ weight^T) / temperature). Where `weight` has a `main_grad` (Megatron-Core's float32
    gradient buffer) its gradient is added there chunk by chunk, in float32, and not returned to autograd; a gradient
    that other uses of a tied weight return is added by Megatron-Core's hook as usual.

    With a split vocabulary `weight` holds this rank's rows; every rank gets the whole result, and its own part of the
    gradient of `hidden`, which the caller adds up. Logits are never gathered: three numbers per position are reduced
    over the ranks (Shoeybi et al. 2019, section 3).
    """
    whole = VocabularyShard(0, len(weight), None)
    return _TokenLogprobs.apply(hidden, weight, targets, settings, vocabulary or whole)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: LogprobSettings, shard: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        rows = shard.rows(weight)
        places = targets - shard.start  # outside [0, rows): another rank's
        found = _Statistics(*(hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(4)))
        logits = hidden.new_empty(min(settings.chunk_tokens, len(hidden)), rows)
        for chunk in _slices(len(hidden), settings.chunk_tokens):
            torch.mm(hidden[chunk], weight[:rows].t(), out=logits[: chunk.stop - chunk.start])
            for part, block in _blocks(logits, chunk):
                for whole, of_block in zip(found, _statistics(block, places[part], settings), strict=True):
                    whole[part] = of_block
        logprobs, entropy, log_z = _distribution(_reduced(found, shard), with_entropy=settings.with_entropy)
        ctx.save_for_backward(hidden, weight, places, entropy, log_z)
        ctx.settings, ctx.rows = settings, rows
        ctx.last_logits = logits
        if not settings.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, places, entropy, log_z = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        main_grad: Any = getattr(weight, "main_grad", None)
        needed, weight = ctx.needs_input_grad[1], weight[: ctx.rows]
        returned = hidden.new_zeros(ctx.saved_tensors[1].shape) if needed and main_grad is None else None
        grad_weight: Tensor = main_grad if returned is None else returned
        logits, ctx.last_logits = ctx.last_logits, None
        for chunk in reversed(_slices(len(hidden), ctx.settings.chunk_tokens)):
            grad_logits = logits[: chunk.stop - chunk.start]
            if chunk.stop != len(hidden):
                torch.mm(hidden[chunk], weight.t(), out=grad_logits)
            for rows, block in _blocks(logits, chunk):
                d_entropy = grad_entropy[rows] if ctx.settings.with_entropy else None
                position = _Position(places[rows], log_z[rows], entropy[rows], grad_logprobs[rows], d_entropy)
                block.copy_(_grad_of_logits(block, position, ctx.settings))
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if needed:
                _accumulate(grad_weight[: ctx.rows], grad_logits, hidden[chunk])
        return grad_hidden, returned, None, None, None


class _Statistics(NamedTuple):
    """What a rank's logits say about each position; float32. Sums are over its ids, relative to the largest."""

    peak: Tensor
    """x*, the largest logit"""
    z: Tensor
    """sum of exp(x - x*)"""
    moment: Tensor
    """sum of exp(x - x*) (x - x*); 0 without entropy"""
    picked: Tensor
    """x(target) - x*; minus infinity where another rank has the target"""


class _Position(NamedTuple):
    """What backward knows about some positions."""

    places: Tensor
    """Columns of the targets; outside the logits where another rank has them."""
    log_z: Tensor
    entropy: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor | None


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _blocks(logits: Tensor, chunk: slice) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a chunk, few at a time: where they are among all positions, and their logits."""
    rows = max(1, _BLOCK_ELEMENTS[logits.device.type] // max(1, logits.shape[1]))
    for part in _slices(chunk.stop - chunk.start, rows):
        yield slice(chunk.start + part.start, chunk.start + part.stop), logits[part]


def _statistics(logits: Tensor, places: Tensor, settings: LogprobSettings) -> _Statistics:
    """Maximum, sum of exponentials and weighted sum of each row of the logits."""
    if logits.shape[1] == 0:  # a rank that has nothing but padding
        zero = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
        return _Statistics(zero + torch.finfo(torch.float32).min, zero, zero, zero - torch.inf)
    x = _scaled(logits, settings)
    peak = x.amax(-1, keepdim=True)
    x.sub_(peak)
    picked = x.gather(1, places.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    picked = picked.where(_owned(places, x), -torch.inf)
    if not settings.with_entropy:
        return _Statistics(peak[:, 0], x.exp_().sum(-1), torch.zeros_like(picked), picked)
    e = x.exp()
    return _Statistics(peak[:, 0], e.sum(-1), e.mul_(x).sum(-1), picked)


def _owned(places: Tensor, logits: Tensor) -> Tensor:
    return (places >= 0) & (places < logits.shape[1])


def _reduced(found: _Statistics, shard: VocabularyShard) -> _Statistics:
    """Statistics over the whole vocabulary, from those of each rank's shard."""
    if not shard.is_split:
        return found
    peak = found.peak.clone()
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX, group=shard.group)
    shift = found.peak - peak
    scale = shift.exp()
    picked = (found.picked + shift).where(found.picked.isfinite(), 0.0)  # one rank has it
    sums = torch.stack([found.z * scale, scale * (found.moment + shift * found.z), picked])
    torch.distributed.all_reduce(sums, group=shard.group)
    return _Statistics(peak, *sums)


def _distribution(found: _Statistics, *, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy, and log of the normaliser."""
    log_z = found.z.log()
    entropy = log_z - found.moment / found.z if with_entropy else torch.zeros_like(log_z)
    return found.picked - log_z, entropy, log_z + found.peak


def _grad_of_logits(logits: Tensor, at: _Position, settings: LogprobSettings) -> Tensor:
    """Gradient of the loss with respect to the logits. For x the capped and divided logits and p their probabilities,
    d log p(t) / dx_v = [v = t] - p_v and dH / dx_v = -p_v (log p_v + H). The cap's own slope is 1 - tanh^2."""
    log_p = _scaled(logits, settings).sub_(at.log_z[:, None])
    if at.grad_entropy is None:
        grad = log_p.exp_().mul_(-at.grad_logprob[:, None])
    else:
        p = log_p.exp()
        slope = log_p.add_(at.entropy[:, None]).mul_(-at.grad_entropy[:, None]).sub_(at.grad_logprob[:, None])
        grad = p.mul_(slope)
    if grad.shape[1]:
        owned = at.grad_logprob.where(_owned(at.places, grad), 0.0)
        grad.scatter_add_(1, at.places.clamp(0, grad.shape[1] - 1)[:, None], owned[:, None])
    if settings.softcap is not None:
        grad.mul_(1 - (logits.float() / settings.softcap).tanh_().square_())
    return grad if settings.temperature == 1.0 else grad.div_(settings.temperature)


def _scaled(logits: Tensor, settings: LogprobSettings) -> Tensor:
    """A float32 copy, capped and divided by the temperature."""
    x = logits.to(torch.float32, copy=True)
    if settings.softcap is not None:
        x.div_(settings.softcap).tanh_().mul_(settings.softcap)
    return x if settings.temperature == 1.0 else x.div_(settings.temperature)


def _accumulate(grad_weight: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """grad_weight += grad_logits^T @ hidden; in its own precision, a band of the vocabulary at a time where the
    product has to be cast (torch has no mixed-precision addmm), so that the product stays small."""
    if grad_weight.dtype == hidden.dtype:
        grad_weight.addmm_(grad_logits.t(), hidden)
        return
    band = max(1, _BAND_ELEMENTS // hidden.shape[1])
    for ids in _slices(len(grad_weight), band):
        grad_weight[ids].add_(grad_logits[:, ids].t() @ hidden)
