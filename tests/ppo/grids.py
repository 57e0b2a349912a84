"""Random grids with holes, and garbage to put under a mask."""

import torch
from torch import Tensor

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def holey_mask(num_rows: int, num_columns: int, *, seed: int) -> Tensor:
    """True for 7 of 10 positions: holes in mid-response, ragged ends; the first position always counts."""
    mask = torch.rand(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, 0] = True
    return mask


def poisoned(x: Tensor, mask: Tensor, garbage: float) -> Tensor:
    """x with garbage under the mask."""
    return torch.where(mask, x, torch.tensor(garbage, dtype=x.dtype))
