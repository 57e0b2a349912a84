"""Base of the estimators that compare the responses to a prompt with each other: recipe table and estimator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.core import metric_registry
from ppoctl.core.metric_registry import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from ppoctl.algorithms.formulas.estimator import AdvantageEstimate, EstimatorInputs
    from ppoctl.algorithms.formulas.groups import Formula


class GroupTable(EstimatorTable):
    """Keys of an estimator that compares the responses to a prompt (a group) with each other."""

    trains_critic: ClassVar[bool] = False
    reads_values: ClassVar[bool] = False
    reads_token_rewards: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = True
    metrics: ClassVar[Mapping[Metric, str]] = {
        metric_registry.ADVANTAGE_EQUAL_GROUPS_FRAC: "an estimator that compares the responses to a prompt, such as "
        "`ppo.advantages.kind` = `grpo`"
    }
    whiten: ClassVar[bool] = False
    """Whether advantages are whitened over all unmasked tokens of the step."""


@dataclass(frozen=True)
class GroupEstimator:
    """Advantages that depend only on the scores of the responses to the same prompt."""

    formula: "Formula"
    scaled_by_step: bool = False
    """Whether advantages are divided by the standard deviation of all scores of the step."""
    gamma: ClassVar[float] = 1.0

    def __call__(self, inputs: "EstimatorInputs") -> "AdvantageEstimate":
        from ppoctl.algorithms.formulas.groups import group_advantages

        return estimate_of(*group_advantages(inputs, self.formula, scaled_by_step=self.scaled_by_step))


def estimate_of(advantages: "Tensor", equal_groups_frac: float) -> "AdvantageEstimate":
    """Return advantages that no critic learns, with the metric that a `GroupTable` declares."""
    from ppoctl.algorithms.formulas.estimator import AdvantageEstimate

    return AdvantageEstimate(advantages, None, {metric_registry.ADVANTAGE_EQUAL_GROUPS_FRAC.name: equal_groups_frac})
