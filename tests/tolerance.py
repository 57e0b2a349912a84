"""Named levels of agreement between two tensors. No other file has a literal tolerance."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Level:
    """Largest allowed difference from the expected result, as a fraction of the largest expected magnitude.

    The difference is relative to the largest magnitude, not to each element, because a sum that cancels to nearly 0
    keeps the rounding error of its terms. If the largest magnitude is below `floor`, `floor` is used instead.
    """

    name: str
    share: float
    floor: float = 1.0

    def check(self, found: Tensor | float, expected: Tensor | float) -> None:
        """Raise AssertionError with the worst difference unless shapes are equal and all numbers agree at this
        level."""
        found, expected = (torch.as_tensor(each).detach().cpu().double() for each in (found, expected))
        assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        if self.share == 0.0:
            assert torch.equal(found, expected), f"not equal:\n{found}\nexpected:\n{expected}"
            return
        scale = max(self.floor, expected.abs().max().item()) if expected.numel() else self.floor
        # Like torch.allclose: NaN agrees with nothing.
        worst = (found - expected).abs().max().item() if expected.numel() else 0.0
        assert worst <= self.share * scale, (
            f"{self.name}: differs by {worst:.3g} at scale {scale:.3g}:\n{found}\nexpected:\n{expected}"
        )


# Bitwise equal (except 0.0 and -0.0, which compare equal).
EXACT = Level("EXACT", 0.0)
# A few roundings of float32 (2^-24 each), or a long sum of them.
FLOAT32 = Level("FLOAT32", 1e-5)
# Weights or activations in bfloat16 (2^-8 each), accumulated in float32.
BFLOAT16 = Level("BFLOAT16", 2e-2)
# A whole step in float32 against float64: several optimizer steps, each from the weights of the one before.
STEP = Level("STEP", 1e-4)
# Recorded numbers of a short run, on a machine that may add in another order.
GOLDEN = Level("GOLDEN", 1e-5, floor=0.1)
