"""Log-probs of tokens and other outputs of the output layer, computed from hidden states. The logits of all tokens
are never in memory together.

Letters: n positions, V vocabulary. Logits exist for one chunk of positions at a time, in the model's dtype. Float32
arithmetic on logits processes a few rows at a time. Backward recomputes the logits of each chunk, except the last
chunk, whose logits still exist. It replaces the logits by their gradient in place. The KL divergence from a frozen
model reads a chunk of the frozen model's logits too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.filters import LEFT_OUT, lowered_to, thresholds

BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
BAND_ELEMENTS = 2**22
"""Elements of the weight's gradient that are computed at a time in the model's dtype, and then added in float32."""


class ExcludedTokens(NamedTuple):
    """Token ids that the sampler excluded at some positions."""

    at: Bool[Tensor, " n"]
    """Whether the ids are excluded at the position."""
    ids: Int[Tensor, " k"]
    """Columns of the logits. Columns outside this rank's logits are ids of other ranks."""


class LogprobSettings(NamedTuple):
    """How to read the output layer."""

    request: OutputRequest
    chunk_tokens: int
    """Number of positions whose logits exist at one time."""
    softcap: float | None = None
    """c in c tanh(logit / c), applied before the temperature (Gemma 2). None: no cap."""
    excluded: ExcludedTokens | None = None
    """Ids that are excluded before the filters are applied. A target is never excluded. None: no id is excluded."""
    block_elements: Mapping[str, int] = BLOCK_ELEMENTS
    """Number of logits converted to float32 at a time: they fit into a CPU core's cache, or keep a GPU busy."""


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


class VocabularyShard(NamedTuple):
    """Rows of the output layer that this rank holds."""

    start: int
    """Id of the first row."""
    total: int
    """Number of ids of the model. Rows for higher ids are padding and are not read."""
    group: torch.distributed.ProcessGroup | None
    """The ranks that hold the other rows. None: this rank holds all rows."""

    def rows(self, weight: Tensor) -> int:
        """Return the number of rows of `weight` that represent an id."""
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
        settings = _with_own_columns(settings, shard.start, rows)
        found = _Statistics(*(hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in _Statistics._fields))
        layers = _layers(hidden, weight, frozen, rows)
        buffers = [inputs.new_empty(min(settings.chunk_tokens, len(inputs)), rows) for inputs, _ in layers]
        for chunk in _slices(len(hidden), settings.chunk_tokens):
            logits = [_product(*layer, chunk, buffer) for layer, buffer in zip(layers, buffers, strict=True)]
            for at, inside in _blocks(chunk, weight, settings):
                block = _statistics([full[inside] for full in logits], places[at], _at(settings, at), shard)
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
                position = _Position(*(tensor[at] for tensor in (*at_positions, *grads)))
                block = [full[inside] for full in logits]
                block[0].copy_(_grad_of_logits(block, position, _at(ctx.settings, at)))
            torch.mm(logits[0], weight[: ctx.rows], out=grad_hidden[chunk])
            if needed:
                _accumulate(grad_weight[: ctx.rows], logits[0], hidden[chunk])
        return grad_hidden, returned, *(None for _ in ctx.needs_input_grad[2:])


class _Statistics(NamedTuple):
    """Statistics of a rank's logits at each position; float32. Sums are over its ids and relative to its largest
    logit."""

    peak: Tensor
    """x*, the largest logit"""
    z: Tensor
    """sum of exp(x - x*)"""
    moment: Tensor
    """sum of exp(x - x*) (x - x*); 0 without entropy"""
    picked: Tensor
    """x(target) - x*; minus infinity if another rank has the target"""
    smallest: Tensor
    """smallest logit that is kept, over all ranks; 0 without filters"""
    other_peak: Tensor
    """y*, the largest logit of the reference; 0 without full KL, like all following fields"""
    other_z: Tensor
    """sum of exp(y - y*)"""
    apart: Tensor
    """sum of exp(x - x*) ((x - x*) - (y - y*)); differences first: small for similar models"""

    @property
    def log_z(self) -> Tensor:
        return self.z.log() + self.peak

    @property
    def other_log_z(self) -> Tensor:
        return self.other_z.log() + self.other_peak


class _Position(NamedTuple):
    """Inputs of backward for some positions."""

    places: Tensor
    """Columns of the targets. The column is outside the logits if another rank has the target."""
    entropy: Tensor
    full_kl: Tensor
    log_z: Tensor
    other_log_z: Tensor
    smallest: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor
    grad_full_kl: Tensor


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


def _statistics(
    logits: Sequence[Tensor], places: Tensor, settings: LogprobSettings, shard: VocabularyShard
) -> _Statistics:
    """Return maxima, sums of exponentials and weighted sums of each row of the logits."""
    zero = torch.zeros(len(places), dtype=torch.float32, device=places.device)
    x = _sampleable(logits[0], places, settings)
    smallest = zero
    if settings.request.is_filtered:
        smallest = _smallest_kept(x, places, settings, shard)
        x.masked_fill_(x < smallest[:, None], LEFT_OUT)
    if x.shape[1] == 0:  # this rank has only padding
        least = zero + torch.finfo(torch.float32).min
        return _Statistics(least, zero, zero, zero - torch.inf, smallest, least, zero, zero)
    peak = x.amax(-1, keepdim=True)
    x.sub_(peak)
    picked = x.gather(1, places.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    picked = picked.where(_owned(places, x), -torch.inf)
    if not settings.request.entropy and len(logits) == 1:
        return _Statistics(peak[:, 0], x.exp_().sum(-1), zero, picked, smallest, zero, zero, zero)
    e = x.exp()
    other_peak = other_z = apart = zero
    if len(logits) > 1:
        y = _scaled(logits[1], settings)
        other_peak = y.amax(-1)
        y.sub_(other_peak[:, None])
        other_z = y.exp().sum(-1)
        apart = y.neg_().add_(x).mul_(e).sum(-1)
    z = e.sum(-1)
    moment = e.mul_(x).sum(-1) if settings.request.entropy else zero
    return _Statistics(peak[:, 0], z, moment, picked, smallest, other_peak, other_z, apart)


def _smallest_kept(x: Tensor, places: Tensor, settings: LogprobSettings, shard: VocabularyShard) -> Tensor:
    """Return the threshold of each position, lowered so that the position's target is kept."""
    group = shard.group if shard.is_split else None
    smallest = thresholds(x, settings.request, num_ids=shard.total, group=group)
    target_logit = torch.full_like(smallest, -torch.inf)
    if x.shape[1]:
        logit = x.gather(1, places.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
        target_logit = logit.where(_owned(places, x), -torch.inf)
    return lowered_to(smallest, target_logit, group)


def _owned(places: Tensor, logits: Tensor) -> Tensor:
    return (places >= 0) & (places < logits.shape[1])


def _reduced(found: _Statistics, shard: VocabularyShard, settings: LogprobSettings) -> _Statistics:
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


def _distribution(found: _Statistics, request: OutputRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(target), entropy and full KL. Entropy and full KL are 0 unless requested."""
    log_z, zero = found.z.log(), torch.zeros_like(found.z)
    entropy = log_z - found.moment / found.z if request.entropy else zero
    full_kl = found.apart / found.z + (found.other_z.log() - log_z) if request.full_kl else zero.clone()
    return found.picked - log_z, entropy, full_kl


def _grad_of_logits(logits: Sequence[Tensor], at: _Position, settings: LogprobSettings) -> Tensor:
    """Return the gradient of the loss with respect to the model's logits. With x the capped and scaled logits, p
    their probabilities over the kept ids, and q the reference's probabilities:

        d log p(t) / dx_v = [v = t] - p_v      dH / dx_v = -p_v (log p_v + H)
        d KL(p || q) / dx_v = p_v (log p_v - log q_v - KL)

    The cap multiplies the gradient by its slope 1 - tanh^2."""
    request = settings.request
    log_p = _sampleable(logits[0], at.places, settings)
    if request.is_filtered:
        log_p.masked_fill_(log_p < at.smallest[:, None], LEFT_OUT)
    log_p.sub_(at.log_z[:, None])
    from_reference = None
    if request.full_kl:
        log_q = _scaled(logits[1], settings).sub_(at.other_log_z[:, None])
        from_reference = log_q.neg_().add_(log_p).sub_(at.full_kl[:, None]).mul_(at.grad_full_kl[:, None])
    if not request.entropy and from_reference is None:
        grad = log_p.exp_().mul_(-at.grad_logprob[:, None])
    else:
        p = log_p.exp()
        slope = log_p.add_(at.entropy[:, None]).mul_(-at.grad_entropy[:, None]) if request.entropy else log_p.zero_()
        slope.sub_(at.grad_logprob[:, None])
        if from_reference is not None:
            slope.add_(from_reference)
        grad = p.mul_(slope)
    if grad.shape[1]:
        owned = at.grad_logprob.where(_owned(at.places, grad), 0.0)
        grad.scatter_add_(1, at.places.clamp(0, grad.shape[1] - 1)[:, None], owned[:, None])
    if settings.softcap is not None:
        grad.mul_(1 - (logits[0].float() / settings.softcap).tanh_().square_())
    return grad if request.temperature == 1.0 else grad.div_(request.temperature)


def _with_own_columns(settings: LogprobSettings, start: int, rows: int) -> LogprobSettings:
    """Return the settings with the excluded ids as columns of this rank's logits."""
    if settings.excluded is None:
        return settings
    own = settings.excluded.ids - start
    return settings._replace(excluded=settings.excluded._replace(ids=own[(own >= 0) & (own < rows)]))


def _at(settings: LogprobSettings, positions: slice) -> LogprobSettings:
    """Return the settings for some positions."""
    barred = settings.excluded
    return settings if barred is None else settings._replace(excluded=barred._replace(at=barred.at[positions]))


def _sampleable(logits: Tensor, places: Tensor, settings: LogprobSettings) -> Tensor:
    """Return the scaled logits of the model, with excluded ids masked out. The target is never excluded."""
    x, barred = _scaled(logits, settings), settings.excluded
    if barred is not None and len(barred.ids):
        left_out = barred.at[:, None] & (barred.ids != places[:, None])
        x[:, barred.ids] = x[:, barred.ids].masked_fill_(left_out, LEFT_OUT)
    return x


def _scaled(logits: Tensor, settings: LogprobSettings) -> Tensor:
    """Return a float32 copy of the logits, capped and divided by the temperature."""
    x = logits.to(torch.float32, copy=True)
    if settings.softcap is not None:
        x.div_(settings.softcap).tanh_().mul_(settings.softcap)
    temperature = settings.request.temperature
    return x if temperature == 1.0 else x.div_(temperature)


def _accumulate(grad_weight: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add grad_logits^T @ hidden to grad_weight. If the dtypes differ, the product is computed and cast for one band
    of the vocabulary at a time, so that it stays small: torch has no mixed-precision addmm."""
    if grad_weight.dtype == hidden.dtype:
        grad_weight.addmm_(grad_logits.t(), hidden)
        return
    band = max(1, BAND_ELEMENTS // hidden.shape[1])
    for ids in _slices(len(grad_weight), band):
        grad_weight[ids].add_(grad_logits[:, ids].t() @ hidden)
