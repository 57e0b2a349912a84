"""What a token drawn by a sampler that is not quite the trainer weighs in the actor's loss, and whether it counts.

All is a function of the log-ratio trainer - sampler of the drawn tokens, at rollout time: positive where the trainer
says a token more often than the sampler. A ratio is its exponential, so a bound of a ratio is one of
trainer / sampler, never of the inverse. Weights carry no gradient.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.ppo.kl import MAX_LOG_RATIO
from ppoctl.ppo.masking import masked_mean

Level = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


@dataclass(frozen=True)
class CorrectionWeights:
    """What tokens weigh."""

    weights: Float[Tensor, "B R"]
    """0 under the mask of the tokens that count."""
    outside: Bool[Tensor, "B R"]
    """Tokens whose ratio lies outside the bounds."""


def log_ratios(
    logprobs: Float[Tensor, "B R"], sampler_logprobs: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
) -> Float[Tensor, "B R"]:
    """The log-ratio trainer - sampler of each token in nats; 0 under the mask, whatever lies there."""
    return torch.where(mask, logprobs.detach() - sampler_logprobs, 0)


def truncated_weights(
    log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, min_ratio: float, max_ratio: float
) -> CorrectionWeights:
    """Truncated importance sampling (TIS): each token weighs its ratio, held within the bounds.

    w = clip(exp(trainer - sampler), min_ratio, max_ratio)
    """
    return _within(_ratio(log_ratio), mask, min_ratio=min_ratio, max_ratio=max_ratio)


def truncated_sequence_weights(
    log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, min_ratio: float, max_ratio: float
) -> CorrectionWeights:
    """Truncated importance sampling of whole sequences: each token weighs the ratio of its sequence, held within the
    bounds.

        w = clip(exp(sum over the sequence of trainer - sampler), min_ratio, max_ratio)
    """
    ratio = _ratio(_summed(log_ratio, mask)).expand_as(log_ratio)
    return _within(ratio, mask, min_ratio=min_ratio, max_ratio=max_ratio)


def inside_weights(
    log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, min_ratio: float, max_ratio: float
) -> CorrectionWeights:
    """IcePop: a token weighs its ratio where that lies within the bounds, and 0 elsewhere. It still counts: means
    divide by it too."""
    ratio = _ratio(log_ratio)
    outside = mask & ((ratio < min_ratio) | (ratio > max_ratio))
    return CorrectionWeights(torch.where(mask & ~outside, ratio, 0), outside)


def plain_weights(log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> CorrectionWeights:
    """Importance sampling without bounds, but for the 20 nats that keep exp finite: each token weighs its ratio."""
    return CorrectionWeights(torch.where(mask, _ratio(log_ratio), 0), torch.zeros_like(mask))


def unit_weights(log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> CorrectionWeights:
    """Every token weighs 1: the sampler is trusted with what is kept."""
    return CorrectionWeights(mask.to(log_ratio.dtype), torch.zeros_like(mask))


def normalized(weights: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """The weights divided by their mean over the counted tokens, so that they average 1; all 0 where they are all 0.
    Raises ValueError when no token counts."""
    mean = masked_mean(weights, mask)
    return torch.where(mask & (mean > 0), weights / mean, 0)


def kept_by_ratio(
    log_ratio: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    level: Level,
    min_ratio: float | None,
    max_ratio: float | None,
) -> Bool[Tensor, "B R"]:
    """Tokens whose ratio trainer / sampler lies within the bounds; None: no bound.

    level says whose ratio: of the token; of its sequence (sequence_sum: the product over the tokens, sequence_mean:
    their geometric mean); sequence_max: of every token of the sequence, so that one outside takes all with it.
    """
    kept = mask
    if min_ratio is not None:
        # The smallest of a sequence is minus the largest of the negative.
        kept = kept & (-_at(-log_ratio, mask, level) >= math.log(min_ratio))
    if max_ratio is not None:
        kept = kept & (_at(log_ratio, mask, level) <= math.log(max_ratio))
    return kept


def kept_by_divergence(
    log_ratio: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    statistic: Literal["k2", "k3"],
    level: Level,
    max_nats: float,
) -> Bool[Tensor, "B R"]:
    """Tokens whose estimate of KL(sampler || trainer) is at most so many nats, at a level as in `kept_by_ratio`.

    k2 = log-ratio^2 / 2          k3 = ratio - 1 - log-ratio
    """
    if statistic == "k2":
        estimate = log_ratio.square() / 2
    else:
        held = log_ratio.clamp(max=MAX_LOG_RATIO)
        estimate = torch.expm1(held) - held
    return mask & (_at(estimate, mask, level) <= max_nats)


def kept_by_gap(log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, max_gap: float) -> Bool[Tensor, "B R"]:
    """Tokens of sequences whose gap (see `sequence_gaps`) is at most so much.
    Source: NeMo-RL's seq_logprob_error_threshold."""
    return mask & (sequence_gaps(log_ratio, mask) <= max_gap)


def sequence_gaps(log_ratio: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B 1"]:
    """The mean over each sequence's tokens of exp|trainer - sampler|: 1 where the two agree; 0 without tokens."""
    return _averaged(_ratio(log_ratio.abs()), mask)


def _ratio(log_ratio: Tensor) -> Tensor:
    # Not from below: there exp vanishes by itself.
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _within(ratio: Tensor, mask: Tensor, *, min_ratio: float, max_ratio: float) -> CorrectionWeights:
    outside = mask & ((ratio < min_ratio) | (ratio > max_ratio))
    return CorrectionWeights(torch.where(mask, ratio.clamp(min_ratio, max_ratio), 0), outside)


def _at(x: Tensor, mask: Tensor, level: Level) -> Tensor:
    """x of each token, or what its sequence makes of it, as `[B, R]` or `[B, 1]`."""
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
    """0 for a sequence without counted tokens."""
    return _summed(x, mask) / mask.sum(1, keepdim=True).clamp(min=1)
