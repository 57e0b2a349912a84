"""Advantages that a Python function of the user computes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.core import metric_registry
from ppoctl.core.metric_registry import Metric
from ppoctl.core.recipe_table import RESULTS
from ppoctl.core.user_functions import FUNCTION_PATTERN, TrainingFunction

if TYPE_CHECKING:
    from ppoctl.algorithms.formulas.estimator import Estimator


class PythonAdvantages(EstimatorTable):
    """Advantages that your own Python function computes from all responses of a step. A bootstrap value
    (`ppo.truncated`) is added to the last reward without a discount.

    Formula: A = function(inputs, **options)
    Source: docs/your-own-loss.md
    Default of: no system
    Figures: advantage/raw_mean, advantage/raw_std
    Other names: verl register_adv_est
    Equal scores: what the function returns
    """

    metrics: ClassVar[Mapping[Metric, str]] = {metric_registry.ADVANTAGE_CUSTOM: "`ppo.advantages.kind` = `python`"}

    kind: Annotated[Literal["python"], RESULTS]
    """Your own Python function."""
    function: Annotated[str, RESULTS, Field(pattern=FUNCTION_PATTERN)]
    """`path.py:name`, with a path relative to the recipe file, or `module:name` of an installed package. The function
    is called with all responses of the step (`EstimatorInputs` in `ppoctl.algorithms.formulas.estimator`), and with
    `options` as keyword arguments. It returns the advantage of each token, or (advantages, {metric: number}). The
    metrics are reported as `advantage/custom_NAME`."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    digest: Annotated[str, RESULTS] = ""
    """SHA-256 of the function's file, written when the recipe is read. A run does not continue with a changed file,
    unless `function` is set again. Empty for a function of an installed package."""
    with_critic: Annotated[bool, RESULTS] = Field(default=False, alias="trains_critic")
    """Whether a critic is trained: the function then receives its values, and returns (advantages, returns), or
    (advantages, returns, {metric: number}). The critic learns the returns."""
    whiten: Annotated[bool, RESULTS] = False
    """Whether advantages are shifted and scaled to zero mean and unit variance over all unmasked tokens of the
    step."""

    @property
    def trains_critic(self) -> bool:
        return self.with_critic

    @property
    def reads_values(self) -> bool:
        return self.with_critic

    @property
    def called(self) -> TrainingFunction:
        """The function with its options."""
        return TrainingFunction("ppo.advantages", self.function, dict(self.options), self.digest)

    def estimator(self) -> "Estimator":
        from ppoctl.algorithms.stages.python_estimator import PythonEstimator

        return PythonEstimator(self.called, self.with_critic)
