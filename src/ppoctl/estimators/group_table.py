"""Base of the estimators that compare the responses to a prompt with each other: recipe table and estimator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ppoctl import metric_registry
from ppoctl.estimators.table import EstimatorTable
from ppoctl.metric_registry import Metric

if TYPE_CHECKING:
    from ppoctl.ppo.estimator import AdvantageEstimate, EstimatorInputs
    from ppoctl.ppo.groups import Formula


class GroupTable(EstimatorTable):
    """Keys of an estimator that compares the responses to a prompt (a group) with each other."""

    trains_critic: ClassVar[bool] = False
    reads_values: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = True
    metrics: ClassVar[Mapping[Metric, str]] = {
        metric_registry.ADVANTAGE_EQUAL_GROUPS_FRAC: "an estimator that compares the responses to a prompt, such as "
        "`ppo.advantages.kind` = `grpo`"
    }
    whiten: ClassVar[bool] = False
    """Whether advantages are whitened: a group has a mean of 0 already."""


@dataclass(frozen=True)
class GroupEstimator:
    """Advantages that depend only on the scores of the responses to the same prompt."""

    formula: "Formula"
    gamma: ClassVar[float] = 1.0

    def __call__(self, inputs: "EstimatorInputs") -> "AdvantageEstimate":
        from ppoctl.ppo.estimator import AdvantageEstimate
        from ppoctl.ppo.groups import group_advantages

        advantages, equal_frac = group_advantages(
            inputs.scores, inputs.valid, inputs.groups, inputs.mask, self.formula
        )
        return AdvantageEstimate(advantages, None, {metric_registry.ADVANTAGE_EQUAL_GROUPS_FRAC.name: equal_frac})
