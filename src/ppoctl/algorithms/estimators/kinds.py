"""All kinds of advantage estimators, and the metrics that they add."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, get_args

from pydantic import Field

from ppoctl.algorithms.estimators.gae import GaeAdvantages
from ppoctl.algorithms.estimators.gdpo import GdpoAdvantages
from ppoctl.algorithms.estimators.grpo import GrpoAdvantages
from ppoctl.algorithms.estimators.grpo_passk import GrpoPasskAdvantages
from ppoctl.algorithms.estimators.monte_carlo import MonteCarloAdvantages
from ppoctl.algorithms.estimators.opo import OpoAdvantages
from ppoctl.algorithms.estimators.python import PythonAdvantages
from ppoctl.algorithms.estimators.raw_reward import RawRewardAdvantages
from ppoctl.algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlusAdvantages
from ppoctl.algorithms.estimators.reinforce_plus_plus_baseline import ReinforcePlusPlusBaselineAdvantages
from ppoctl.algorithms.estimators.remax import RemaxAdvantages
from ppoctl.algorithms.estimators.rloo import RlooAdvantages
from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.core.metric_registry import Metric

AdvantagesTable = Annotated[
    GaeAdvantages
    | MonteCarloAdvantages
    | GrpoAdvantages
    | RlooAdvantages
    | OpoAdvantages
    | GrpoPasskAdvantages
    | GdpoAdvantages
    | RawRewardAdvantages
    | ReinforcePlusPlusAdvantages
    | ReinforcePlusPlusBaselineAdvantages
    | RemaxAdvantages
    | PythonAdvantages,
    Field(discriminator="kind"),
]
ESTIMATORS: tuple[type[EstimatorTable], ...] = get_args(get_args(AdvantagesTable)[0])


def algorithm_of(kind: str) -> str:
    """Return the name of an algorithm with the estimator of this kind; "PPO" for an unknown kind."""
    return next(
        (each.algorithm for each in ESTIMATORS if kind in get_args(each.model_fields["kind"].annotation)), "PPO"
    )


@dataclass(frozen=True)
class EstimatorMetric:
    """One metric of an estimator, for a recipe."""

    metric: Metric
    is_on: bool
    """Whether the recipe's estimator reports the metric."""
    needs: str
    """The setting that the metric requires, as the end of a sentence."""


def metrics_of(table: EstimatorTable) -> Iterator[EstimatorMetric]:
    """Yield the metrics of all estimators, and whether the estimator of this table reports them."""
    needs_by_metric = {metric: needs for kind in ESTIMATORS for metric, needs in kind.metrics.items()}
    for metric, needs in needs_by_metric.items():
        yield EstimatorMetric(metric, table.reports(metric), needs)
