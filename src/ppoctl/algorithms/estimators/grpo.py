"""Group relative policy optimization: scores relative to the other responses to the same prompt."""

from typing import Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.group_table import GroupEstimator, GroupTable
from ppoctl.core.recipe_table import RESULTS


class GrpoAdvantages(GroupTable):
    """Group relative policy optimization (GRPO): the score of a response after reward shaping, minus the mean over
    the responses to the same prompt (the group). There is no critic, and all tokens of a response have the same
    advantage. The token scores of a scorer are summed over the response. Responses without a score are not in the
    mean; truncated responses that `ppo.truncated` filters are. A group with fewer than two scores has advantages of
    exactly 0; a group with one score has its score as the advantage in verl, and 0 in NeMo-RL.

    Formula: A_t = (s - mean(group)) / (std(group) + 1e-6), std with the divisor n - 1; scale = "batch": std of all
        scores of the step; scale = "none": A_t = s - mean(group); leave_one_out: mean and std of the other responses
        of the group
    Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; scale = "batch": Lite PPO (arXiv:2508.08221);
        scale = "none": Dr. GRPO (arXiv:2503.20783)
    Default of: no system
    Figures: advantage/equal_groups_frac, advantage/raw_std
    Other names: verl grpo, grpo_vectorized; NeMo-RL grpo (leave_one_out); OpenRLHF group_norm,
        dr_grpo (scale = "none"); TRL GRPOTrainer
    Equal scores: 0
    """

    algorithm: ClassVar[str] = "GRPO"

    kind: Annotated[Literal["grpo"], RESULTS]
    """Score relative to the other responses to the same prompt, without a critic."""
    scale: Annotated[Literal["group", "batch", "none"], RESULTS] = "group"
    """Divisor of the advantages. group: the standard deviation of the scores of the group, so that the few responses
    that score differently from the others have the largest advantages. batch: the standard deviation of all scores of
    the step, which is the same for every group. none: 1 (Dr. GRPO).
    Default of: verl, NeMo-RL; TRL too, but adds 1e-4 instead of 1e-6."""
    leave_one_out: Annotated[bool, RESULTS] = False
    """Whether mean and standard deviation of a group leave out the response itself. Where the other scores are equal,
    or there is only one, the advantage is not divided. In NeMo-RL, this depends on rounding: equal scores of 0.1 may
    have a standard deviation above 0 there. With `scale = "none"`, this is `rloo`.
    Default of: verl, OpenRLHF, TRL (off); NeMo-RL has it on (`use_leave_one_out_baseline`)."""

    def estimator(self) -> GroupEstimator:
        from ppoctl.algorithms.formulas import groups

        if self.scale == "group":
            return GroupEstimator(groups.standardized_by_others if self.leave_one_out else groups.standardized)
        formula = groups.from_mean_of_others if self.leave_one_out else groups.from_mean
        return GroupEstimator(formula, scaled_by_step=self.scale == "batch")
