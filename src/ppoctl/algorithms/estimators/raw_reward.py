"""Discounted returns as advantages, without a critic."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.core.recipe_table import RESULTS, Fraction

if TYPE_CHECKING:
    from ppoctl.algorithms.formulas.estimator import AdvantageEstimate, EstimatorInputs


class RawRewardAdvantages(EstimatorTable):
    """Discounted returns, without a critic: the advantages of `monte_carlo`. With gamma 1 and no KL in the reward,
    every token gets the reward of its response. There is no baseline: advantages differ in sign only if rewards do,
    or if the advantages are whitened.

    Formula: A_t = sum over l of gamma^l r_t+l
    Source: Williams 1992 (REINFORCE); NeMo-RL's `raw_reward`, which has no gamma and keeps an unused critic
    Default of: no system
    Figures: advantage/raw_mean, advantage/raw_std
    Other names: NeMo-RL raw_reward
    Equal scores: s; whitened: s - mean(G), scaled
    """

    trains_critic: ClassVar[bool] = False
    reads_values: ClassVar[bool] = False
    algorithm: ClassVar[str] = "REINFORCE"

    kind: Annotated[Literal["raw_reward"], RESULTS]
    """Discounted sum of rewards, without a critic."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    whiten: Annotated[bool, RESULTS] = True
    """Whether advantages are shifted and scaled to zero mean and unit variance over all unmasked tokens of the
    step."""

    def estimator(self) -> "RawReward":
        return RawReward(self.gamma)


@dataclass(frozen=True)
class RawReward:
    """Discounted returns as advantages. No critic learns them."""

    gamma: float

    def __call__(self, inputs: "EstimatorInputs") -> "AdvantageEstimate":
        from ppoctl.algorithms.formulas.estimator import AdvantageEstimate
        from ppoctl.algorithms.formulas.generalized_advantages import monte_carlo

        return AdvantageEstimate(monte_carlo(inputs.token_rewards, inputs.mask, gamma=self.gamma), None, {})
