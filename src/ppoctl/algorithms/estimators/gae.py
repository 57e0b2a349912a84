"""Generalized advantage estimation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.core import metric_registry
from ppoctl.core.metric_registry import Metric
from ppoctl.core.recipe_table import RESULTS, Fraction, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from ppoctl.algorithms.formulas.estimator import AdvantageEstimate, EstimatorInputs


class GaeAdvantages(EstimatorTable):
    """Generalized advantage estimation (GAE). The advantage of a token is a discounted sum of TD errors: how much
    better the rest of the response turned out than the critic predicted. Masked tokens inside a response are skipped
    and are not discounted by gamma or lambda.

    Formula: A_t = sum over l of (gamma lambda)^l (r_t+l + gamma V_t+l+1 - V_t+l); return G_t = A_t + V_t, in which
    A_t uses gae_lambda_value if it is written
    Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16; two lambdas: VC-PPO (arXiv:2503.01491)
    Default of: verl (gamma and lambda 1, whitened); NeMo-RL, TRL and trlX use lambda 0.95
    Figures: advantage/raw_mean, advantage/raw_std, value/explained_variance
    Other names: verl gae; NeMo-RL gae; OpenRLHF gae; TRL PPOTrainer
    Equal scores: not 0, unless the critic predicts the score
    """

    trains_critic: ClassVar[bool] = True
    reads_values: ClassVar[bool] = True
    metrics: ClassVar[Mapping[Metric, str]] = {
        metric_registry.ADVANTAGE_LAMBDA_MEAN: "`ppo.advantages.length_adaptive_alpha`, which is not set"
    }

    kind: Annotated[Literal["gae"], RESULTS]
    """Generalized advantage estimation."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, RESULTS, Fraction] = 1.0
    """GAE's lambda. 1: Monte Carlo returns minus values; 0: one-step TD errors."""
    gae_lambda_value: Annotated[float | None, RESULTS, Fraction] = None
    """Separate lambda for the returns that the critic learns (1 in VC-PPO and VAPO); absent: `gae_lambda`."""
    length_adaptive_alpha: Annotated[float | None, RESULTS, Positive] = None
    """Factor that makes lambda of the actor's advantages depend on the length of the response: lambda approaches 1 as
    the number n of unmasked tokens grows. Absent: `gae_lambda` for every response.

    Formula: lambda = 1 - 1 / max(1, length_adaptive_alpha n)
    Source: VAPO (arXiv:2504.05118), eq. 7, with 0.05; the lower bound of 1 is from NeMo-RL
    Default of: verl and NeMo-RL (off)
    Figures: advantage/lambda_mean
    """
    whiten: Annotated[bool, RESULTS] = True
    """Whether advantages are shifted and scaled to zero mean and unit variance over all unmasked tokens of the
    step."""

    def reports(self, metric: Metric) -> bool:
        return super().reports(metric) and self.length_adaptive_alpha is not None

    def estimator(self) -> "Gae":
        lam_value = self.gae_lambda if self.gae_lambda_value is None else self.gae_lambda_value
        return Gae(self.gamma, self.gae_lambda, lam_value, self.length_adaptive_alpha)


@dataclass(frozen=True)
class Gae:
    """Generalized advantage estimation. Advantages and returns may have different lambdas."""

    gamma: float
    lam: float
    lam_value: float
    alpha: float | None
    """Factor of the length-adaptive lambda of the advantages; None: the lambda is `lam`."""

    def __call__(self, inputs: "EstimatorInputs") -> "AdvantageEstimate":
        from ppoctl.algorithms.formulas.estimator import AdvantageEstimate
        from ppoctl.algorithms.formulas.generalized_advantages import gae, length_adaptive_lambda
        from ppoctl.algorithms.formulas.masking import masked_mean

        rewards, values, mask = inputs.token_rewards, inputs.values, inputs.mask
        assert values is not None, "GAE requires the critic's values, which were not computed"
        lam: float | Tensor = self.lam
        metrics = {}
        if self.alpha is not None:
            lam = length_adaptive_lambda(mask, alpha=self.alpha)
            metrics[metric_registry.ADVANTAGE_LAMBDA_MEAN.name] = float(masked_mean(lam, mask.any(dim=1)))
        advantages, returns = gae(rewards, values, mask, gamma=self.gamma, lam=lam)
        if self.alpha is not None or self.lam_value != self.lam:
            _, returns = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam_value)
        return AdvantageEstimate(advantages, returns, metrics)
