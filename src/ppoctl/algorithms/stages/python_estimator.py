"""An advantage estimator of the user (`ppo.advantages.kind = "python"`), and checks of what it returns."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch

from ppoctl.algorithms.formulas.estimator import AdvantageEstimate, EstimatorInputs
from ppoctl.algorithms.stages.python_loss import CUSTOM, grid_of, require_finite, with_metrics
from ppoctl.core.user_functions import TrainingFunction


@dataclass(frozen=True)
class PythonEstimator:
    """Advantages that a function of the user computes from a whole step."""

    function: TrainingFunction
    has_returns: bool
    """Whether the function also returns what the critic learns."""
    gamma: ClassVar[float] = 1.0

    def __call__(self, inputs: EstimatorInputs) -> AdvantageEstimate:
        """Return what the function returns, exactly 0 where masked out. Raises RecipeError if the function fails or
        returns something else, and NonFiniteError if a number is not finite."""
        expected = ("advantages", "returns") if self.has_returns else ("advantages",)
        returned, metrics = with_metrics(self.function, self.function(inputs), expected)
        grids = []
        for name, value in zip(expected, returned, strict=True):
            grid = grid_of(self.function, value, inputs.mask.shape, f"as {name}")
            require_finite(self.function, grid, inputs.mask, f"{name}")
            grids.append(torch.where(inputs.mask, grid.detach(), 0).to(inputs.token_rewards.dtype))
        named = {f"advantage/{CUSTOM}{name}": self._number(name, value) for name, value in metrics.items()}
        return AdvantageEstimate(grids[0], grids[1] if self.has_returns else None, named)

    def _number(self, name: str, value: object) -> float:
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not isinstance(number, Real) or not math.isfinite(number):
            self.function.refuse(f"returned `{value}` as `{name}`, which is not a finite number")
        return float(number)
