"""Discounted returns as advantages, which a critic learns too."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.core.recipe_table import RESULTS, Fraction

if TYPE_CHECKING:
    from ppoctl.algorithms.formulas.estimator import AdvantageEstimate, EstimatorInputs


class MonteCarloAdvantages(EstimatorTable):
    """Discounted returns, without the critic's values. The only exception is `ppo.truncated = "bootstrap"`, which
    adds the critic's bootstrap value after the last token of a truncated response. The critic is still trained on
    these returns; `raw_reward` has no critic. With gamma 1 and no KL in the reward, every token gets the reward of
    its response.

    Formula: A_t = G_t = sum over l of gamma^l r_t+l
    Source: Williams 1992 (REINFORCE)
    Default of: no system
    Figures: advantage/raw_mean, advantage/raw_std
    Equal scores: s; whitened: s - mean(G), scaled
    """

    trains_critic: ClassVar[bool] = True
    reads_values: ClassVar[bool] = False

    kind: Annotated[Literal["monte_carlo"], RESULTS]
    """Discounted sum of rewards."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    whiten: Annotated[bool, RESULTS] = True
    """Whether advantages are shifted and scaled to zero mean and unit variance over all unmasked tokens of the
    step."""

    def estimator(self) -> "MonteCarlo":
        return MonteCarlo(self.gamma)


@dataclass(frozen=True)
class MonteCarlo:
    """Discounted returns, which are also the advantages."""

    gamma: float

    def __call__(self, inputs: "EstimatorInputs") -> "AdvantageEstimate":
        from ppoctl.algorithms.formulas.estimator import AdvantageEstimate
        from ppoctl.algorithms.formulas.generalized_advantages import monte_carlo

        returns = monte_carlo(inputs.token_rewards, inputs.mask, gamma=self.gamma)
        return AdvantageEstimate(returns.clone(), returns, {})
