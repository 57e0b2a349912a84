"""REINFORCE++: discounted returns, whitened over the step, without a critic."""

from typing import Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.raw_reward import RawReward
from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.core.recipe_table import RESULTS, Fraction


class ReinforcePlusPlusAdvantages(EstimatorTable):
    """REINFORCE++: discounted returns, whitened over all unmasked tokens of the step, without a critic. These are the
    advantages of `raw_reward` with `whiten = true`. The KL penalty of `ppo.kl` may be in the reward; the return of a
    token then contains the penalties of this and all later tokens. NeMo-RL subtracts the penalty of the token alone,
    and has no gamma. NeMo-RL and OpenRLHF divide by the standard deviation with the divisor n.

    Formula: G_t = sum over l of gamma^l r_t+l; A_t = (G_t - mean(G)) / sqrt(var(G) + 1e-8), mean and var over the
        unmasked tokens of the step, var with the divisor n - 1
    Source: Hu et al. 2025 (arXiv:2501.03262)
    Default of: no system
    Figures: advantage/raw_mean, advantage/raw_std
    Other names: verl reinforce_plus_plus; NeMo-RL reinforce_plus_plus (minus_baseline = false); OpenRLHF reinforce;
        papers REINFORCE++
    Equal scores: s - mean(G), scaled; 0 if all scores of the step are equal
    """

    trains_critic: ClassVar[bool] = False
    reads_values: ClassVar[bool] = False
    whiten: ClassVar[bool] = True
    """Whether advantages are whitened: the mean of the step is the baseline."""

    algorithm: ClassVar[str] = "REINFORCE++"

    kind: Annotated[Literal["reinforce_plus_plus"], RESULTS]
    """Discounted sum of rewards, whitened over the step, without a critic."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""

    def estimator(self) -> RawReward:
        return RawReward(self.gamma)
