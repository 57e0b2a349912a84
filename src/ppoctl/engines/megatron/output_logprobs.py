"""Log-probs of tokens and other outputs of the output layer, computed from hidden states. The logits of all tokens
are never in memory together.

Letters: n positions, V vocabulary. Logits exist for one chunk of positions at a time, in the model's dtype. Float32
arithmetic on logits processes a few rows at a time. Backward recomputes the logits of each chunk, except the last
chunk, whose logits still exist. It replaces the logits by their gradient in place. The KL divergence from a frozen
model reads a chunk of the frozen model's logits too.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.logit_blocks import (
    BackwardInputs,
    LogitStatistics,
    LogprobSettings,
    VocabularyShard,
    replace_by_gradient,
    settings_at,
    statistics_of,
    with_own_columns,
)

BAND_ELEMENTS = 2**22
"""Elements of the weight's gradient that are computed at a time in the model's dtype, and then added in float32."""


class PositionOutputs(NamedTuple):
    """Outputs of the last pipeline stage for the positions to read; float32."""

    outputs: Float[Tensor, " n"]
    """Log-probs of the targets, or values."""
    entropy: Float[Tensor, " n"] | None = None
    full_kl: Float[Tensor, " n"] | None = None
    values: Float[Tensor, " n"] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the outputs, which Megatron-Core's schedule reads from the output of a model with experts."""
        return self.outputs.device


class FrozenOutputs(NamedTuple):
    """Inputs of the reference's output layer, for the KL divergence from the reference. They get no gradient."""

    hidden: Float[Tensor, "n hidden"]
    weight: Float[Tensor, "V hidden"]
    """Rows of the same ids as the rows of the model's weight."""


def token_logprobs(
    hidden: Float[Tensor, "n hidden"],
    weight: Float[Tensor, "V hidden"],
    targets: Int[Tensor, " n"],
    settings: LogprobSettings,
    vocabulary: VocabularyShard | None = None,
    reference: FrozenOutputs | None = None,
) -> PositionOutputs:
    """Return log p(target) of each position and, if requested, the entropy of p and KL(p || reference), in nats. The
    outputs are float32 and differentiable.

    p = softmax(cap(hidden @ weight^T) / temperature), over the ids that are not excluded and that the filters keep
    (`filters.thresholds`). The target is always one of these ids. The choice of ids has no gradient. The reference's
    distribution is over all ids.

    If `weight` has a `main_grad` (Megatron-Core's float32 gradient buffer), the gradient of `weight` is added to this
    buffer chunk by chunk, in float32, and is not returned to autograd. Gradients from other uses of a tied weight are
    added by Megatron-Core's hook as usual.

    With a split vocabulary, `weight` holds this rank's rows. Every rank gets the complete outputs, and its own part
    of the gradient of `hidden`. The caller sums these parts. Logits are never gathered: a few numbers per position
    are reduced over the ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
    """
    assert settings.request.full_kl == (reference is not None), "full KL and a reference must be given together"
    shard = vocabulary or VocabularyShard(0, len(weight), None)
    frozen = () if reference is None else (reference.hidden, reference.weight)
    logprobs, entropy, full_kl = _TokenLogprobs.apply(hidden, weight, targets, settings, shard, *frozen)
    request = settings.request
    return PositionOutputs(logprobs, entropy if request.entropy else None, full_kl if request.full_kl else None)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: LogprobSettings,
        shard: VocabularyShard,
        *frozen: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = shard.rows(weight)
        places = targets - shard.start  # outside [0, rows): on another rank
        settings = with_own_columns(settings, shard.start, rows)
        zeros = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in LogitStatistics._fields)
        found = LogitStatistics(*zeros)
        layers = _layers(hidden, weight, frozen, rows)
        buffers = [inputs.new_empty(min(settings.chunk_tokens, len(inputs)), rows) for inputs, _ in layers]
        for chunk in _slices(len(hidden), settings.chunk_tokens):
            logits = [_product(*layer, chunk, buffer) for layer, buffer in zip(layers, buffers, strict=True)]
            for at, inside in _blocks(chunk, weight, settings):
                block = statistics_of([full[inside] for full in logits], places[at], settings_at(settings, at), shard)
                for full, part in zip(found, block, strict=True):
                    full[at] = part
        found = _reduced(found, shard, settings)
        logprobs, entropy, full_kl = _distribution(found, settings.request)
        at_positions = (places, entropy, full_kl, found.log_z, found.other_log_z, found.smallest)
        ctx.save_for_backward(hidden, weight, *at_positions, *frozen)
        ctx.settings, ctx.rows = settings, rows
        ctx.last_logits = buffers
        if not settings.request.entropy:
            ctx.mark_non_differentiable(entropy)
        if not settings.request.full_kl:
            ctx.mark_non_differentiable(full_kl)
        return logprobs, entropy, full_kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *rest = ctx.saved_tensors
        at_positions, frozen = rest[:6], rest[6:]
        grad_hidden = torch.empty_like(hidden)
        main_grad: Any = getattr(weight, "main_grad", None)
        needed = ctx.needs_input_grad[1]
        returned = hidden.new_zeros(weight.shape) if needed and main_grad is None else None
        grad_weight: Tensor = main_grad if returned is None else returned
        layers = _layers(hidden, weight, frozen, ctx.rows)
        buffers, ctx.last_logits = ctx.last_logits, None
        for chunk in reversed(_slices(len(hidden), ctx.settings.chunk_tokens)):
            logits = [buffer[: chunk.stop - chunk.start] for buffer in buffers]
            if chunk.stop != len(hidden):
                logits = [_product(*layer, chunk, buffer) for layer, buffer in zip(layers, buffers, strict=True)]
            for at, inside in _blocks(chunk, weight, ctx.settings):
                position = BackwardInputs(*(tensor[at] for tensor in (*at_positions, *grads)))
                block = [full[inside] for full in logits]
                replace_by_gradient(block, position, settings_at(ctx.settings, at))
            torch.mm(logits[0], weight[: ctx.rows], out=grad_hidden[chunk])
            if needed:
                _accumulate(grad_weight[: ctx.rows], logits[0], hidden[chunk], in_product=ctx.settings.fused)
        return grad_hidden, returned, *(None for _ in ctx.needs_input_grad[2:])


def _layers(hidden: Tensor, weight: Tensor, frozen: Sequence[Tensor], rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and weight of the output layer of the model and, if there is one, of the reference."""
    return [(hidden, weight[:rows]), *([(frozen[0], frozen[1][:rows])] if frozen else [])]


def _product(hidden: Tensor, weight: Tensor, chunk: slice, buffer: Tensor) -> Tensor:
    """Return the logits of a chunk of positions."""
    return torch.mm(hidden[chunk], weight.t(), out=buffer[: chunk.stop - chunk.start])


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _blocks(chunk: slice, weight: Tensor, settings: LogprobSettings) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of a few rows of a chunk, as a slice of all positions and a slice of the chunk. All ranks compute
    thresholds together and need the same blocks, so the block size depends only on the padded size of the weight."""
    elements = settings.block_elements[weight.device.type] // (2 if settings.request.full_kl else 1)  # models
    for inside in _slices(chunk.stop - chunk.start, max(1, elements // len(weight))):
        yield slice(chunk.start + inside.start, chunk.start + inside.stop), inside


def _reduced(found: LogitStatistics, shard: VocabularyShard, settings: LogprobSettings) -> LogitStatistics:
    """Return statistics over the full vocabulary, computed from the statistics of all ranks."""
    if not shard.is_split:
        return found
    full_kl = settings.request.full_kl
    peaks = torch.stack([found.peak, found.other_peak]) if full_kl else found.peak[None].clone()
    torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX, group=shard.group)
    shift = found.peak - peaks[0]
    scale = shift.exp()
    picked = (found.picked + shift).where(found.picked.isfinite(), 0.0)  # exactly one rank has the target
    sums = [found.z * scale, scale * (found.moment + shift * found.z), picked]
    if full_kl:
        other_shift = found.other_peak - peaks[1]
        sums += [found.other_z * other_shift.exp(), scale * (found.apart + (shift - other_shift) * found.z)]
    total = torch.stack(sums)
    torch.distributed.all_reduce(total, group=shard.group)
    z, moment, picked, *others = total
    reduced = found._replace(peak=peaks[0], z=z, moment=moment, picked=picked)
    if not full_kl:
        return reduced
    return reduced._replace(other_peak=peaks[1], other_z=others[0], apart=others[1])


def _distribution(found: LogitStatistics, request: OutputRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(target), entropy and full KL. Entropy and full KL are 0 unless requested."""
    log_z, zero = found.z.log(), torch.zeros_like(found.z)
    entropy = log_z - found.moment / found.z if request.entropy else zero
    full_kl = found.apart / found.z + (found.other_z.log() - log_z) if request.full_kl else zero.clone()
    return found.picked - log_z, entropy, full_kl


def _accumulate(grad_weight: Tensor, grad_logits: Tensor, hidden: Tensor, *, in_product: bool) -> None:
    """Add grad_logits^T @ hidden to grad_weight. If the dtypes differ, the product is computed and cast for one band
    of the vocabulary at a time, so that it stays small; `in_product`: on a GPU, it adds in float32 itself."""
    if grad_weight.dtype == hidden.dtype:
        grad_weight.addmm_(grad_logits.t(), hidden)
        return
    if in_product and hidden.is_cuda:  # torch has this product on GPUs only
        torch.addmm(grad_weight, grad_logits.t(), hidden, out_dtype=torch.float32, out=grad_weight)
        return
    band = max(1, BAND_ELEMENTS // hidden.shape[1])
    for ids in _slices(len(grad_weight), band):
        grad_weight[ids].add_(grad_logits[:, ids].t() @ hidden)
