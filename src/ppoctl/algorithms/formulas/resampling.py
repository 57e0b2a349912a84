"""Resampling of rows by their scores (PF-PPO): weights, and the sampled rows.

`valid` marks the rows that may be sampled; the scores of other rows are ignored. Only the ratios of weights matter.
Source of the weights: verl's `compute_pf_ppo_reweight_data`, which adds 1e-8 to each weight; here a weight may be 0.
"""

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor


def power_weights(scores: Float[Tensor, " B"], valid: Bool[Tensor, " B"], *, power: float) -> Float64[Tensor, " B"]:
    """Return |score|^power of each row, divided by the largest; all 0 if all scores are 0."""
    sizes = scores.to(torch.float64).abs().where(valid, 0.0)
    # The quotient is at most 1, so its power does not overflow.
    return (sizes / sizes.max().clamp(min=torch.finfo(torch.float64).tiny)).pow(power)


def max_min_weights(scores: Float[Tensor, " B"], valid: Bool[Tensor, " B"]) -> Float64[Tensor, " B"]:
    """Return 1 for the rows with the highest or the lowest score, and 0 for others."""
    chosen = (scores == scores[valid].max()) | (scores == scores[valid].min())
    return (chosen & valid).to(torch.float64)


def max_random_weights(scores: Float[Tensor, " B"], valid: Bool[Tensor, " B"]) -> Float64[Tensor, " B"]:
    """Return 0.4 for the rows with the highest score, and 0.1 for others."""
    is_best = scores == scores[valid].max()
    return (0.1 + 0.3 * is_best.to(torch.float64)).where(valid, 0.0)


def or_uniform(weights: Float64[Tensor, " B"], valid: Bool[Tensor, " B"]) -> Float64[Tensor, " B"]:
    """Return the weights, or weight 1 for every valid row if all weights are 0."""
    return weights if bool(weights.any()) else valid.to(torch.float64)


def effective_rows(weights: Float64[Tensor, " B"]) -> float:
    """Return the effective number of rows, (sum w)^2 / sum w^2: n for n equal weights. Source: Kish 1965."""
    return float(weights.sum().square() / weights.square().sum())


def sampled_rows(weights: Float64[Tensor, " B"], *, seed: int) -> Int64[Tensor, " B"]:
    """Return B rows, sampled with replacement in proportion to the weights. A row with weight 0 is never sampled."""
    rows = weights.nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    return rows[torch.multinomial(weights[rows], len(weights), replacement=True, generator=generator)]
