"""Rollout correction: importance weights for tokens from a sampler that differs from the trainer, and rejection of
tokens.

All functions take log-ratios: the trainer's log-prob minus the sampler's log-prob of each sampled token at rollout
time. A log-ratio is positive if the trainer gives the token a higher probability than the sampler. A ratio is the
exponential of a log-ratio. A bound on a ratio is a bound on trainer / sampler, never on the inverse. Weights carry no
gradient.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.formulas.kl import MAX_LOG_RATIO
from ppoctl.algorithms.formulas.masking import masked_mean

RatioLevel = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


@dataclass(frozen=True)
class CorrectionWeights:
    """Importance weights of tokens."""

    weights: Float[Tensor, "B R"]
    """0 where masked out."""
    outside: Bool[Tensor, "B R"]
    """Tokens whose ratio is outside the bounds."""


def log_ratios(
    logprobs: Float[Tensor, "B R"], sampler_logprobs: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
) -> Float[Tensor, "B R"]:
    """Return the log-ratio trainer - sampler of each token in nats; 0 where masked out, even if the inputs are NaN
    there."""
    return torch.where(mask, logprobs.detach() - sampler_logprobs, 0)


def truncated_weights(
    log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, min_ratio: float, max_ratio: float
) -> CorrectionWeights:
    """Truncated importance sampling (TIS): the weight of a token is its ratio, clipped to the bounds.

    w = clip(exp(trainer - sampler), min_ratio, max_ratio)
    """
    return _within(_ratio(log_ratio), mask, min_ratio=min_ratio, max_ratio=max_ratio)


def truncated_sequence_weights(
    log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, min_ratio: float, max_ratio: float
) -> CorrectionWeights:
    """Truncated importance sampling of sequences: the weight of a token is the ratio of its sequence, clipped to the
    bounds.

        w = clip(exp(sum over the sequence of trainer - sampler), min_ratio, max_ratio)
    """
    ratio = _ratio(_summed(log_ratio, mask)).expand_as(log_ratio)
    return _within(ratio, mask, min_ratio=min_ratio, max_ratio=max_ratio)


def inside_weights(
    log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, min_ratio: float, max_ratio: float
) -> CorrectionWeights:
    """IcePop: the weight of a token is its ratio if this ratio is within the bounds, otherwise 0. Means still divide
    by the number of all tokens."""
    return _inside(_ratio(log_ratio), mask, min_ratio=min_ratio, max_ratio=max_ratio)


def inside_sequence_weights(
    log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, min_ratio: float, max_ratio: float
) -> CorrectionWeights:
    """IcePop of sequences: the weight of a token is the ratio of its sequence (see `truncated_sequence_weights`) if
    this ratio is within the bounds, otherwise 0."""
    ratio = _ratio(_summed(log_ratio, mask)).expand_as(log_ratio)
    return _inside(ratio, mask, min_ratio=min_ratio, max_ratio=max_ratio)


def plain_weights(log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> CorrectionWeights:
    """Importance sampling: the weight of a token is its ratio, bounded only at exp(20), so that exp stays finite."""
    return CorrectionWeights(torch.where(mask, _ratio(log_ratio), 0), torch.zeros_like(mask))


def unit_weights(log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> CorrectionWeights:
    """Return weight 1 for every unmasked token: kept tokens are not corrected."""
    return CorrectionWeights(mask.to(log_ratio.dtype), torch.zeros_like(mask))


def normalized(
    weights: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    kept: Bool[Tensor, "B R"],
    *,
    over: Literal["kept_tokens", "tokens", "sequences"],
) -> Float[Tensor, "B R"]:
    """Return the weights of the kept tokens divided by a mean of weights; 0 for other tokens. If the mean is 0, all
    are 0.

    `over` selects the mean:

    - kept_tokens: over the kept tokens.
    - tokens: over all unmasked tokens.
    - sequences: over the sequences with an unmasked token, of the mean over the unmasked tokens of the sequence.

    Source of the last two: verl's `rollout_is_batch_normalize` at the levels token and sequence. Raises ValueError if
    no token is kept or unmasked.
    """
    if over == "sequences":
        mean = masked_mean(_averaged(weights, mask), mask.any(1, keepdim=True))
    else:
        mean = masked_mean(weights, kept if over == "kept_tokens" else mask)
    return torch.where(kept & (mean > 0), weights / mean, 0)


def kept_by_ratio(
    log_ratio: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    level: RatioLevel,
    min_ratio: float | None,
    max_ratio: float | None,
) -> Bool[Tensor, "B R"]:
    """Return the tokens whose ratio trainer / sampler is within the bounds; None: no bound.

    `level` selects the ratio that is compared:

    - token: the ratio of the token.
    - sequence_sum: the product over the tokens of its sequence.
    - sequence_mean: the geometric mean over the tokens of its sequence.
    - sequence_max: the ratio of every token of the sequence, so that one token outside the bounds rejects all of
      them.
    """
    kept = mask
    if min_ratio is not None:
        # The minimum over a sequence is minus the maximum of the negated log-ratios.
        kept = kept & (-_at(-log_ratio, mask, level) >= math.log(min_ratio))
    if max_ratio is not None:
        kept = kept & (_at(log_ratio, mask, level) <= math.log(max_ratio))
    return kept


def kept_by_divergence(
    log_ratio: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    statistic: Literal["k2", "k3"],
    level: RatioLevel,
    max_nats: float,
) -> Bool[Tensor, "B R"]:
    """Return the tokens whose estimate of KL(sampler || trainer) is at most `max_nats`, at the given level (see
    `kept_by_ratio`).

        k2 = log-ratio^2 / 2          k3 = ratio - 1 - log-ratio
    """
    if statistic == "k2":
        estimate = log_ratio.square() / 2
    else:
        bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
        estimate = torch.expm1(bounded) - bounded
    return mask & (_at(estimate, mask, level) <= max_nats)


def kept_by_gap(log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, max_gap: float) -> Bool[Tensor, "B R"]:
    """Return the tokens of sequences whose log-prob difference (see `sequence_gaps`) is at most `max_gap`. Source:
    NeMo-RL's seq_logprob_error_threshold."""
    return mask & (sequence_gaps(log_ratio, mask) <= max_gap)


def sequence_gaps(log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B 1"]:
    """Return the mean of exp|trainer - sampler| over each sequence's tokens: 1 if trainer and sampler agree; 0 for a
    sequence without tokens."""
    return _averaged(_ratio(log_ratio.abs()), mask)


def _ratio(log_ratio: Tensor) -> Tensor:
    # No lower clamp is required: exp of a very negative number is 0.
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _within(ratio: Tensor, mask: Tensor, *, min_ratio: float, max_ratio: float) -> CorrectionWeights:
    outside = mask & ((ratio < min_ratio) | (ratio > max_ratio))
    return CorrectionWeights(torch.where(mask, ratio.clamp(min_ratio, max_ratio), 0), outside)


def _inside(ratio: Tensor, mask: Tensor, *, min_ratio: float, max_ratio: float) -> CorrectionWeights:
    outside = mask & ((ratio < min_ratio) | (ratio > max_ratio))
    return CorrectionWeights(torch.where(mask & ~outside, ratio, 0), outside)


def _at(x: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """Return x per token, or aggregated over its sequence, as `[B, R]` or `[B, 1]`."""
    if level == "token":
        return x
    if level == "sequence_sum":
        return _summed(x, mask)
    if level == "sequence_mean":
        return _averaged(x, mask)
    return torch.where(mask, x, -torch.inf).amax(1, keepdim=True)


def _summed(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum(1, keepdim=True)


def _averaged(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the unmasked tokens of each sequence; 0 for a sequence without any."""
    return _summed(x, mask) / mask.sum(1, keepdim=True).clamp(min=1)
