"""Group relative policy optimization: scores relative to the other responses to the same prompt."""

from typing import Annotated, Literal

from ppoctl.estimators.group_table import GroupEstimator, GroupTable
from ppoctl.recipe_table import RESULTS


class GrpoAdvantages(GroupTable):
    """Group relative policy optimization (GRPO): the score of a response after reward shaping, minus the mean over
    the responses to the same prompt (the group). There is no critic, and all tokens of a response have the same
    advantage. The token scores of a scorer are summed over the response. Responses without a score are not in the
    mean; truncated responses that `ppo.truncated` filters are. If all scores of a group are equal, or fewer than two
    of its responses have a score, its advantages are exactly 0. A group with one score has its score as the advantage
    in verl, and 0 in NeMo-RL. NeMo-RL leaves the response itself out of its mean and standard deviation
    (use_leave_one_out_baseline), and does not divide where that standard deviation is 0.

    Formula: A_t = (s - mean(group)) / (std(group) + 1e-6), std with the divisor n - 1; scale = "none": A_t = s -
    mean(group)
    Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; scale = "none": Dr. GRPO (arXiv:2503.20783)
    Default of: no system
    Figures: advantage/equal_groups_frac, advantage/raw_std
    """

    kind: Annotated[Literal["grpo"], RESULTS]
    """Score relative to the other responses to the same prompt, without a critic."""
    scale: Annotated[Literal["group", "none"], RESULTS] = "group"
    """Divisor of the advantages. group: the standard deviation of the scores of the group, so that the few responses
    that score differently from the others have the largest advantages. none: 1 (Dr. GRPO).
    Default of: verl, NeMo-RL; TRL too, but adds 1e-4 instead of 1e-6."""

    def estimator(self) -> GroupEstimator:
        from ppoctl.ppo.groups import from_mean, standardized

        return GroupEstimator(standardized if self.scale == "group" else from_mean)
