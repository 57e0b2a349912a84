"""Sums, means and whitening over the counted tokens of a grid.

What is under the mask is never read: it may be NaN and changes neither a result nor a gradient. Nothing here
talks to another rank.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Added to a variance before its root: keeps the whitening of numbers that are nearly equal finite.
WHITEN_EPS = 1e-8

# A spread of so many roundings of the largest number is no spread: whitening would blow the rounding up to 1, and a
# ratio of variances would be anything.
ROUNDINGS = 4


def masked_sum(x: Float[Tensor, "*grid"], mask: Bool[Tensor, "*grid"]) -> Float[Tensor, ""]:
    """The sum of x over the counted positions; 0 when there are none."""
    return _blank(x, mask).sum()


def masked_mean(x: Float[Tensor, "*grid"], mask: Bool[Tensor, "*grid"]) -> Float[Tensor, ""]:
    """The mean of x over the counted positions: sum(x) / n.

    Raises ValueError when no position counts: such a mean has no meaning, and a 0 would be read as one.
    """
    return masked_sum(x, mask) / _counted(mask)


def masked_variance(x: Float[Tensor, "*grid"], mask: Bool[Tensor, "*grid"]) -> Float[Tensor, ""]:
    """The unbiased variance over the n counted positions: sum((x - mean)^2) / (n - 1), and 0 when n is 1.

    Exactly 0 where the numbers are equal but for rounding: a root of it within 4 roundings of the largest number.
    Raises ValueError when no position counts.
    """
    return _deviation(x, mask)[1].to(x.dtype)


def whiten(x: Float[Tensor, "*grid"], mask: Bool[Tensor, "*grid"]) -> Float[Tensor, "*grid"]:
    """x with mean 0 and variance 1 over all counted positions, and exactly 0 under the mask.

        (x - mean) / sqrt(variance + 1e-8)

    Numbers that are equal but for rounding (see `masked_variance`) all become exactly 0, and so does a single one.
    Hand in the whole rollout batch: whitening per microbatch would let a memory knob change the gradient. Source:
    the advantage whitening of verl and NeMo-RL. Raises ValueError when no position counts.
    """
    deviation, variance = _deviation(x, mask)
    whitened = deviation * (variance + WHITEN_EPS).rsqrt()
    return torch.where(variance > 0, whitened, torch.zeros_like(whitened)).to(x.dtype)


def _deviation(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """x - mean (0 under the mask) and the variance, in float64: there a mean of equal float32 numbers is exact."""
    counted, exact = _counted(mask), _blank(x, mask).to(torch.float64)
    deviation = _blank(exact - exact.sum() / counted, mask)
    variance = deviation.square().sum() / max(counted - 1, 1)
    rounding = ROUNDINGS * torch.finfo(x.dtype).eps * exact.detach().abs().max()
    return deviation, torch.where(variance > rounding.square(), variance, torch.zeros_like(variance))


def _blank(x: Tensor, mask: Tensor) -> Tensor:
    # where, not a product: NaN times 0 is NaN. And before every square or product: their gradients are products.
    return torch.where(mask, x, 0)


def _counted(mask: Tensor) -> int:
    num_tokens = int(mask.sum())
    if num_tokens == 0:
        raise ValueError(f"0 counted tokens: every position of the {tuple(mask.shape)} mask is False")
    return num_tokens
