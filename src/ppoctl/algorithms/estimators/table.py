"""Base class of the recipe tables of advantage estimators.

The recipe imports these tables, so torch is imported only when an estimator runs. A key that several kinds have is
written in each of their tables, so that the order of keys in recipes and pages is the order of the table.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ppoctl.core.metric_registry import Metric
from ppoctl.core.recipe_table import Table

if TYPE_CHECKING:
    from ppoctl.algorithms.formulas.estimator import Estimator


class EstimatorTable(Table):
    """Keys of one kind of estimator. Each kind adds `kind`, with its own literal."""

    @property
    @abstractmethod
    def trains_critic(self) -> bool:
        """Whether the estimate has returns, which a critic learns."""

    @property
    @abstractmethod
    def reads_values(self) -> bool:
        """Whether the estimator reads the critic's values."""

    algorithm: ClassVar[str] = "PPO"
    """Name of an algorithm with this estimator, on screens."""
    compares_groups: ClassVar[bool] = False
    """Whether the advantage of a response depends only on its score and the scores of the other responses to its
    prompt."""
    reads_token_rewards: ClassVar[bool] = True
    """Whether the estimator reads the rewards of tokens, and with them a KL penalty in the reward; otherwise it reads
    scores of responses."""
    reads_components: ClassVar[bool] = False
    """Whether the estimator reads the score of each component of the reward, instead of the score after shaping."""
    reads_baselines: ClassVar[bool] = False
    """Whether the estimator reads the reward of a greedy response to each prompt."""
    metrics: ClassVar[Mapping[Metric, str]] = {}
    """Metrics that the estimator adds to the stage `advantages`, each with the setting that it requires, as the end
    of a sentence."""

    def reports(self, metric: Metric) -> bool:
        """Return whether the estimator reports one of its metrics with these settings."""
        return metric in self.metrics

    @abstractmethod
    def estimator(self) -> "Estimator":
        """Return the estimator with the settings of the table."""
