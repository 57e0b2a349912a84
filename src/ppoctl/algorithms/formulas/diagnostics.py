"""Diagnostics: metrics that show whether an update is healthy, as plain floats.

Each function computes from the tokens that it receives. It does not reduce over ranks, and does not add a group to
the names of metrics.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.formulas.importance import log_ratios, sequence_gaps
from ppoctl.algorithms.formulas.kl import KlEstimator
from ppoctl.algorithms.formulas.masking import masked_mean, masked_variance
from ppoctl.algorithms.formulas.policy_loss import PolicyLoss, token_ratios
from ppoctl.algorithms.formulas.value_loss import squared_errors


def policy_diagnostics(
    logprobs: Float[Tensor, "B R"],
    old_logprobs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    loss: PolicyLoss,
) -> dict[str, float]:
    """Return how far the policy moved: clip fractions, KL from the old policy, and quantiles of the ratio.

    clip_frac_high, clip_frac_low, clip_frac (their sum) and dual_clip_frac: fraction of tokens that each clip of this
    loss applies to (`PolicyLoss.clipped`); absent if the loss has no such clip. approx_kl: k3 estimate of KL(old ||
    new), in nats. ratio_mean, max, p01, p50, p99 (see `nearest_rank`): of the ratio that the loss reads, over tokens.
    Raises ValueError if all tokens are masked out.
    """
    with torch.no_grad():
        ratio = loss.ratios(logprobs, old_logprobs, mask)
        metrics = {
            name: masked_mean(clipped.float(), mask) for name, clipped in loss.clipped(ratio, advantages).items()
        }
        metrics["approx_kl"] = masked_mean(KlEstimator("k3").estimates(old_logprobs, logprobs), mask)
        metrics["ratio_mean"] = masked_mean(ratio, mask)
        ratios = ratio[mask]
        for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            metrics[f"ratio_{name}"] = nearest_rank(ratios, share=share)
        metrics["ratio_max"] = ratios.max()
    return _as_floats(metrics)


def value_diagnostics(
    values: Float[Tensor, "B R"],
    old_values: Float[Tensor, "B R"],
    returns: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    clip: float | None,
) -> dict[str, float]:
    """Return how well the critic predicts: explained variance, clip fraction, and the scale of values and returns.

    explained_variance: of V_old, the values that GAE used. clip_frac: fraction of tokens whose clipped error is
    larger than the unclipped error. value_error: mean |V - G|.
    Raises ValueError if all tokens are masked out.
    """
    with torch.no_grad():
        errors, clipped_errors = squared_errors(values, old_values, returns, mask, clip=clip)
        metrics = {
            "explained_variance": explained_variance(old_values, returns, mask),
            "clip_frac": masked_mean((clipped_errors > errors).float(), mask),
            "value_mean": masked_mean(values, mask),
            "return_mean": masked_mean(returns, mask),
            "return_std": masked_variance(returns, mask).sqrt(),
            "value_error": masked_mean((values - returns).abs(), mask),
        }
    return _as_floats(metrics)


def explained_variance(
    values: Float[Tensor, "B R"], returns: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
) -> Float[Tensor, ""]:
    """Return the fraction of the returns' variance that the values explain: 1 - Var(G - V) / Var(G).

    It is 0 if all returns are equal up to rounding. Raises ValueError if all tokens are masked out.
    """
    variance = masked_variance(returns, mask)
    unexplained = masked_variance(returns - values, mask)
    return torch.where(variance > 0, 1.0 - unexplained / variance, 0.0)


def sampler_gap(
    logprobs: Float[Tensor, "B R"], sampler_logprobs: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
) -> dict[str, float]:
    """Return how far the trainer's log-probs are from the sampler's, for the same weights and tokens.

    gap_mean_abs and gap_max_abs: |trainer - sampler| in nats. gap_k3: k3 estimate of KL(sampler || trainer).
    ess_frac: (sum w)^2 / (n sum w^2) with w = exp(trainer - sampler), the effective sample size of the importance
    weights as a fraction of the n tokens (Kish); 1 if the two agree. sequence_gap_mean and sequence_gap_max:
    `correction.sequence_gaps` over sequences with an unmasked token, the value that `max_sequence_gap` bounds.
    Raises ValueError if all tokens are masked out.
    """
    with torch.no_grad():
        log_ratio = log_ratios(logprobs, sampler_logprobs, mask)
        gap, sequences = log_ratio.abs(), sequence_gaps(log_ratio, mask)[mask.any(1)]
        weights = token_ratios(logprobs, sampler_logprobs, mask)
        metrics = {
            "gap_mean_abs": masked_mean(gap, mask),
            "gap_max_abs": gap.max(),
            "gap_k3": masked_mean(KlEstimator("k3").estimates(sampler_logprobs, logprobs), mask),
            "ess_frac": masked_mean(weights, mask).square() / masked_mean(weights.square(), mask),
            "sequence_gap_mean": sequences.mean(),
            "sequence_gap_max": sequences.max(),
        }
    return _as_floats(metrics)


def nearest_rank(sample: Float[Tensor, " N"], *, share: float) -> Float[Tensor, ""]:
    """Return the number with about `share` of the sample below it: sorted[round(share (N - 1))], without
    interpolation."""
    # Not torch.quantile: it rejects more than 2^24 numbers.
    return sample.kthvalue(round(share * (sample.numel() - 1)) + 1).values


def _as_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    # One transfer from the device instead of one per metric.
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
