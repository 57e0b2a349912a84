"""REINFORCE++ with baseline: scores relative to the mean of their group, whitened over the step."""

from typing import Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.group_table import GroupEstimator, GroupTable
from ppoctl.core.recipe_table import RESULTS


class ReinforcePlusPlusBaselineAdvantages(GroupTable):
    """REINFORCE++ with baseline: the score of a response after reward shaping, minus the mean over the responses to
    the same prompt (the group), whitened over all unmasked tokens of the step. There is no critic. Responses without
    a score are not in the mean; truncated responses that `ppo.truncated` filters are in the mean, but not in the
    whitening. NeMo-RL and OpenRLHF divide by the standard deviation with the divisor n, and may add a KL penalty.

    Formula: D = s - mean(group); A_t = (D - mean(D)) / sqrt(var(D) + 1e-8), mean and var over the unmasked tokens of
        the step, var with the divisor n - 1
    Source: Hu et al. 2025 (arXiv:2501.03262)
    Default of: no system
    Figures: advantage/equal_groups_frac, advantage/raw_std
    Other names: verl reinforce_plus_plus_baseline; NeMo-RL reinforce_plus_plus; OpenRLHF reinforce_baseline
    Equal scores: -mean(D), scaled: near 0, because long responses have more tokens than short ones; 0 if all groups
        are equal
    """

    whiten: ClassVar[bool] = True
    """Whether advantages are whitened over all unmasked tokens of the step."""

    algorithm: ClassVar[str] = "REINFORCE++ baseline"

    kind: Annotated[Literal["reinforce_plus_plus_baseline"], RESULTS]
    """Score relative to the other responses to the same prompt, whitened over the step, without a critic."""

    def estimator(self) -> GroupEstimator:
        from ppoctl.algorithms.formulas.groups import from_mean

        return GroupEstimator(from_mean)
