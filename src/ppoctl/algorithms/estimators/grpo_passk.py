"""GRPO for pass@k: only the best response to a prompt has an advantage."""

from typing import Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.group_table import GroupEstimator, GroupTable
from ppoctl.core.recipe_table import RESULTS


class GrpoPasskAdvantages(GroupTable):
    """GRPO for pass@k: the best response to a prompt has its lead over the second best as the advantage, and all
    other responses have 0. There is no critic, and all tokens of a response have the same advantage. If two responses
    are best, all advantages are 0: with scores of 0 and 1, a prompt is learned only while exactly one response is
    right. Responses without a score are left out; truncated responses that `ppo.truncated` filters are compared, so
    the actor learns nothing from a prompt whose best response is filtered. A group with fewer than two scores has
    advantages of exactly 0; verl stops the run.

    Formula: A_t = (best - second best) / (std(group) + 1e-6) for the best response, 0 for the others, std with the
        divisor n - 1; scale = "none": without the divisor
    Source: arXiv:2503.19595
    Default of: no system
    Figures: advantage/equal_groups_frac, advantage/raw_std
    Other names: verl grpo_passk
    Equal scores: 0
    """

    algorithm: ClassVar[str] = "GRPO pass@k"

    kind: Annotated[Literal["grpo_passk"], RESULTS]
    """Lead of the best response over the second best, without a critic."""
    scale: Annotated[Literal["group", "none"], RESULTS] = "group"
    """Divisor of the advantages. group: the standard deviation of the scores of the group. none: 1.
    Default of: verl."""

    def estimator(self) -> GroupEstimator:
        from ppoctl.algorithms.formulas.groups import best_only, best_only_scaled

        return GroupEstimator(best_only_scaled if self.scale == "group" else best_only)
