"""On-policy RL with optimal reward baseline: scores relative to the length-weighted mean of their group."""

from typing import Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.group_table import GroupEstimator, GroupTable
from ppoctl.core.recipe_table import RESULTS


class OpoAdvantages(GroupTable):
    """On-policy RL with optimal reward baseline (OPO): the score of a response after reward shaping, minus the mean
    over the responses to the same prompt (the group), weighted by their lengths. There is no critic, and all tokens
    of a response have the same advantage. The length of a response is its number of unmasked tokens, so responses
    that `ppo.truncated` filters have no weight. Responses without a score are not in the mean. A group with fewer
    than two scores has advantages of exactly 0; a group with one score has its score as the advantage in verl.

    Formula: A_t = s - sum(length s) / sum(length), sums over the group
    Source: Hao et al. 2025 (arXiv:2505.23585)
    Default of: no system
    Figures: advantage/equal_groups_frac, advantage/raw_std
    Other names: verl opo
    Equal scores: 0
    """

    algorithm: ClassVar[str] = "OPO"

    kind: Annotated[Literal["opo"], RESULTS]
    """Score relative to the length-weighted mean of the responses to the same prompt, without a critic."""

    def estimator(self) -> GroupEstimator:
        from ppoctl.algorithms.formulas.groups import from_weighted_mean

        return GroupEstimator(from_weighted_mean)
