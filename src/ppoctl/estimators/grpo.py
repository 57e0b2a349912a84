"""Group relative policy optimization: scores relative to the other responses to the same prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ppoctl import metric_registry
from ppoctl.estimators.table import EstimatorTable
from ppoctl.metric_registry import Metric
from ppoctl.recipe_table import RESULTS

if TYPE_CHECKING:
    from ppoctl.ppo.estimator import AdvantageEstimate, EstimatorInputs


class GrpoAdvantages(EstimatorTable):
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

    trains_critic: ClassVar[bool] = False
    reads_values: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = True
    metrics: ClassVar[Mapping[Metric, str]] = {
        metric_registry.ADVANTAGE_EQUAL_GROUPS_FRAC: "`ppo.advantages.kind` = `grpo`"
    }
    whiten: ClassVar[bool] = False
    """Whether advantages are whitened: a group has a mean of 0 already."""

    kind: Annotated[Literal["grpo"], RESULTS]
    """Score relative to the other responses to the same prompt, without a critic."""
    scale: Annotated[Literal["group", "none"], RESULTS] = "group"
    """Divisor of the advantages. group: the standard deviation of the scores of the group, so that the few responses
    that score differently from the others have the largest advantages. none: 1 (Dr. GRPO).
    Default of: verl, NeMo-RL; TRL too, but adds 1e-4 instead of 1e-6."""

    def estimator(self) -> "Grpo":
        return Grpo(scaled=self.scale == "group")


@dataclass(frozen=True)
class Grpo:
    """Scores relative to the other responses to the same prompt."""

    scaled: bool
    """Whether advantages are divided by the standard deviation of their group."""
    gamma: ClassVar[float] = 1.0

    def __call__(self, inputs: "EstimatorInputs") -> "AdvantageEstimate":
        from ppoctl.ppo.estimator import AdvantageEstimate
        from ppoctl.ppo.groups import group_advantages

        advantages, equal_frac = group_advantages(
            inputs.scores, inputs.valid, inputs.groups, inputs.mask, scaled=self.scaled
        )
        return AdvantageEstimate(advantages, None, {metric_registry.ADVANTAGE_EQUAL_GROUPS_FRAC.name: equal_frac})
