"""How token rewards and values become advantages and returns; part of 50-advantages."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.ppo.advantages import gae, length_adaptive_lambda, monte_carlo
from ppoctl.ppo.masking import masked_mean


@dataclass(frozen=True)
class AdvantageEstimate:
    """Advantages before whitening, what the critic learns, and figures."""

    advantages: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Gae:
    """Generalised advantages; those of the policy and the returns of the critic may each have a lambda."""

    gamma: float
    lam: float
    lam_value: float
    alpha: float | None
    """Where it is, lambda of the policy by length."""

    def __call__(
        self, rewards: Float[Tensor, "B R"], values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
    ) -> AdvantageEstimate:
        lam: float | Tensor = self.lam
        figures = {}
        if self.alpha is not None:
            lam = length_adaptive_lambda(mask, alpha=self.alpha)
            figures[metric_registry.ADVANTAGE_LAMBDA_MEAN.name] = float(masked_mean(lam, mask.any(dim=1)))
        advantages, returns = gae(rewards, values, mask, gamma=self.gamma, lam=lam)
        if self.alpha is not None or self.lam_value != self.lam:
            _, returns = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam_value)
        return AdvantageEstimate(advantages, returns, figures)


@dataclass(frozen=True)
class MonteCarlo:
    """Discounted returns, which are the advantages too."""

    gamma: float

    def __call__(
        self,
        rewards: Float[Tensor, "B R"],
        values: Float[Tensor, "B R"],  # noqa: ARG002 - for those that ask the critic
        mask: Bool[Tensor, "B R"],
    ) -> AdvantageEstimate:
        returns = monte_carlo(rewards, mask, gamma=self.gamma)
        return AdvantageEstimate(returns.clone(), returns, {})


Estimator = Gae | MonteCarlo
"""Token rewards, values and mask to advantages and returns."""
