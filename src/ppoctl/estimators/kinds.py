"""All kinds of advantage estimators, and the metrics that they add."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, get_args

from pydantic import Field

from ppoctl.estimators.gae import GaeAdvantages
from ppoctl.estimators.grpo import GrpoAdvantages
from ppoctl.estimators.monte_carlo import MonteCarloAdvantages
from ppoctl.estimators.raw_reward import RawRewardAdvantages
from ppoctl.estimators.remax import RemaxAdvantages
from ppoctl.estimators.table import EstimatorTable
from ppoctl.metric_registry import Metric

AdvantagesTable = Annotated[
    GaeAdvantages | MonteCarloAdvantages | GrpoAdvantages | RawRewardAdvantages | RemaxAdvantages,
    Field(discriminator="kind"),
]
ESTIMATORS: tuple[type[EstimatorTable], ...] = get_args(get_args(AdvantagesTable)[0])


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
    for kind in ESTIMATORS:
        for metric, needs in kind.metrics.items():
            yield EstimatorMetric(metric, isinstance(table, kind) and table.reports(metric), needs)
