"""Float32 arithmetic on a block of logits: the statistics of each position that its outputs need, and the gradient.

Letters: n positions of the block, V ids of this rank. Plain arithmetic makes one pass over the block per operation.
With `LogprobSettings.fused`, torch compiles it to kernels that read the logits once or twice and keep float32 numbers
in registers. Filters, excluded ids and a reference's logits are always plain.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.filters import LEFT_OUT, lowered_to, thresholds

BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


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
    fused: bool = False
    """Whether compiled kernels replace sequences of operations, where there are such kernels."""


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


class LogitStatistics(NamedTuple):
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


class BackwardInputs(NamedTuple):
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


def statistics_of(
    logits: Sequence[Tensor], places: Tensor, settings: LogprobSettings, shard: VocabularyShard
) -> LogitStatistics:
    """Return maxima, sums of exponentials and weighted sums of each row of the logits."""
    if _is_fused(logits, settings):
        peak, z, moment, picked = _compiled(fused_statistics)(logits[0], places, **_scaling(settings))
        zero = torch.zeros_like(z)
        return LogitStatistics(peak, z, moment, picked, zero, zero, zero, zero)
    zero = torch.zeros(len(places), dtype=torch.float32, device=places.device)
    x = _sampleable(logits[0], places, settings)
    smallest = zero
    if settings.request.is_filtered:
        smallest = _smallest_kept(x, places, settings, shard)
        x.masked_fill_(x < smallest[:, None], LEFT_OUT)
    if x.shape[1] == 0:  # this rank has only padding
        least = zero + torch.finfo(torch.float32).min
        return LogitStatistics(least, zero, zero, zero - torch.inf, smallest, least, zero, zero)
    peak = x.amax(-1, keepdim=True)
    x.sub_(peak)
    picked = x.gather(1, places.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    picked = picked.where(_owned(places, x), -torch.inf)
    if not settings.request.entropy and len(logits) == 1:
        return LogitStatistics(peak[:, 0], x.exp_().sum(-1), zero, picked, smallest, zero, zero, zero)
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
    return LogitStatistics(peak[:, 0], z, moment, picked, smallest, other_peak, other_z, apart)


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


def replace_by_gradient(logits: Sequence[Tensor], at: BackwardInputs, settings: LogprobSettings) -> None:
    """Overwrite the model's logits with the gradient of the loss with respect to them."""
    if _is_fused(logits, settings):
        given = (at.places, at.log_z, at.entropy, at.grad_logprob, at.grad_entropy)
        _compiled(fused_gradient)(logits[0], given, **_scaling(settings))
    else:
        logits[0].copy_(_gradient(logits, at, settings))


def _is_fused(logits: Sequence[Tensor], settings: LogprobSettings) -> bool:
    request = settings.request
    is_plain = request.is_filtered or request.full_kl or settings.excluded is not None or logits[0].shape[1] == 0
    return settings.fused and not is_plain


def _scaling(settings: LogprobSettings) -> dict[str, Any]:
    """Return the arguments for each combination of which a function is compiled."""
    request = settings.request
    return {"temperature": request.temperature, "softcap": settings.softcap, "with_entropy": request.entropy}


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Not a decorator: `torch.compile` imports its compiler.
    return torch.compile(function)


def fused_statistics(
    logits: Tensor, places: Tensor, *, temperature: float, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first four fields of `LogitStatistics`, in operations that torch can compile."""
    x = _out_of_place(logits, temperature, softcap)
    peak = x.amax(-1)
    shifted = x - peak[:, None]
    e = shifted.exp()
    moment = (e * shifted).sum(-1) if with_entropy else torch.zeros_like(peak)
    picked = shifted.gather(1, places.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return peak, e.sum(-1), moment, picked.where(_owned(places, logits), -torch.inf)


def fused_gradient(
    logits: Tensor, given: tuple[Tensor, ...], *, temperature: float, softcap: float | None, with_entropy: bool
) -> None:
    """Overwrite the logits with `_gradient`, in operations that torch can compile. `given`: places, log z, entropy,
    and the gradients of log-probs and entropies."""
    places, log_z, entropy, grad_logprob, grad_entropy = given
    log_p = _out_of_place(logits, temperature, softcap) - log_z[:, None]
    slope = -grad_logprob[:, None]
    if with_entropy:
        slope = slope - (log_p + entropy[:, None]) * grad_entropy[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == places[:, None]
    grad = log_p.exp() * slope + torch.where(is_target, grad_logprob[:, None], 0.0)
    if softcap is not None:
        grad = grad * (1 - (logits.float() / softcap).tanh().square())
    logits.copy_(grad / temperature)


def _out_of_place(logits: Tensor, temperature: float, softcap: float | None) -> Tensor:
    x = logits.float()
    return (x if softcap is None else (x / softcap).tanh() * softcap) / temperature


def _gradient(logits: Sequence[Tensor], at: BackwardInputs, settings: LogprobSettings) -> Tensor:
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


def with_own_columns(settings: LogprobSettings, start: int, rows: int) -> LogprobSettings:
    """Return the settings with the excluded ids as columns of this rank's logits."""
    if settings.excluded is None:
        return settings
    own = settings.excluded.ids - start
    return settings._replace(excluded=settings.excluded._replace(ids=own[(own >= 0) & (own < rows)]))


def settings_at(settings: LogprobSettings, positions: slice) -> LogprobSettings:
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
