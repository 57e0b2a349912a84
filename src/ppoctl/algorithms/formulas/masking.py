"""Sums, means and whitening over the unmasked positions of a grid.

Masked-out positions are never read: they may contain NaN and change neither a result nor a gradient. No function
communicates with other ranks.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Number that is added to a variance before the square root, so that whitening nearly equal numbers stays finite.
WHITEN_EPS = 1e-8

# A standard deviation counts as 0 if it is at most this many rounding errors of the largest number. Whitening would
# otherwise scale rounding errors up to 1, and a ratio of variances would be meaningless.
ROUNDINGS = 4


def masked_sum(x: Float[Tensor, "*grid"], mask: Bool[Tensor, "*grid"]) -> Float[Tensor, ""]:
    """Return the sum of x over the unmasked positions; 0 if there are none."""
    return _blank(x, mask).sum()


def masked_mean(x: Float[Tensor, "*grid"], mask: Bool[Tensor, "*grid"]) -> Float[Tensor, ""]:
    """Return the mean of x over the unmasked positions: sum(x) / n.

    Raises ValueError if all positions are masked out: the mean is then undefined, and a 0 would be read as a real
    mean.
    """
    return masked_sum(x, mask) / _unmasked_count(mask)


def masked_variance(x: Float[Tensor, "*grid"], mask: Bool[Tensor, "*grid"]) -> Float[Tensor, ""]:
    """Return the unbiased variance over the n unmasked positions: sum((x - mean)^2) / (n - 1); 0 if n is 1.

    The variance is exactly 0 if the numbers are equal up to rounding: its square root is at most 4 rounding errors of
    the largest number. Raises ValueError if all positions are masked out.
    """
    return _deviation(x, mask)[1].to(x.dtype)


def whiten(x: Float[Tensor, "*grid"], mask: Bool[Tensor, "*grid"]) -> Float[Tensor, "*grid"]:
    """Return x with mean 0 and variance 1 over all unmasked positions, and exactly 0 where masked out.

        (x - mean) / sqrt(variance + 1e-8)

    Numbers that are equal up to rounding (see `masked_variance`) all become exactly 0, and so does a single number.
    Pass the whole rollout batch: whitening per microbatch would let a memory setting change the gradient. Source: the
    advantage whitening of verl and NeMo-RL. Raises ValueError if all positions are masked out.
    """
    deviation, variance = _deviation(x, mask)
    whitened = deviation * (variance + WHITEN_EPS).rsqrt()
    return torch.where(variance > 0, whitened, torch.zeros_like(whitened)).to(x.dtype)


def _deviation(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return x - mean (0 where masked out) and the variance, in float64: the mean of equal float32 numbers is then
    exact."""
    num_unmasked, exact = _unmasked_count(mask), _blank(x, mask).to(torch.float64)
    deviation = _blank(exact - exact.sum() / num_unmasked, mask)
    variance = deviation.square().sum() / max(num_unmasked - 1, 1)
    rounding = ROUNDINGS * torch.finfo(x.dtype).eps * exact.detach().abs().max()
    return deviation, torch.where(variance > rounding.square(), variance, torch.zeros_like(variance))


def _blank(x: Tensor, mask: Tensor) -> Tensor:
    # `where` instead of a product, because NaN times 0 is NaN. Apply it before every square or product: their
    # gradients are products.
    return torch.where(mask, x, 0)


def _unmasked_count(mask: Tensor) -> int:
    num_tokens = int(mask.sum())
    if num_tokens == 0:
        raise ValueError(f"0 unmasked tokens: every position of the {tuple(mask.shape)} mask is False")
    return num_tokens
