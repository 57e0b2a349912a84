"""Estimators of advantages and returns from token rewards and values; part of 50-advantages."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.ppo.advantages import gae, length_adaptive_lambda, monte_carlo
from ppoctl.ppo.masking import masked_mean


@dataclass(frozen=True)
class AdvantageEstimate:
    """Advantages before whitening, returns that the critic learns, and metrics."""

    advantages: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Gae:
    """Generalized advantage estimation. Advantages and returns may have different lambdas."""

    gamma: float
    lam: float
    lam_value: float
    alpha: float | None
    """Factor of the length-adaptive lambda of the advantages; None: the lambda is `lam`."""

    def __call__(
        self, rewards: Float[Tensor, "B R"], values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
    ) -> AdvantageEstimate:
        lam: float | Tensor = self.lam
        metrics = {}
        if self.alpha is not None:
            lam = length_adaptive_lambda(mask, alpha=self.alpha)
            metrics[metric_registry.ADVANTAGE_LAMBDA_MEAN.name] = float(masked_mean(lam, mask.any(dim=1)))
        advantages, returns = gae(rewards, values, mask, gamma=self.gamma, lam=lam)
        if self.alpha is not None or self.lam_value != self.lam:
            _, returns = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam_value)
        return AdvantageEstimate(advantages, returns, metrics)


@dataclass(frozen=True)
class MonteCarlo:
    """Discounted returns, which are also the advantages."""

    gamma: float

    def __call__(
        self,
        rewards: Float[Tensor, "B R"],
        values: Float[Tensor, "B R"],  # noqa: ARG002 - read by other estimators
        mask: Bool[Tensor, "B R"],
    ) -> AdvantageEstimate:
        returns = monte_carlo(rewards, mask, gamma=self.gamma)
        return AdvantageEstimate(returns.clone(), returns, {})


Estimator = Gae | MonteCarlo
"""Function from token rewards, values and mask to advantages and returns."""
