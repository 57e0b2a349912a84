"""60-critic_update: train the critic on the returns."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch.records import Advantages, Rollouts, State, Update, Values
from ppoctl.ppo.aggregation import Aggregation
from ppoctl.ppo.diagnostics import explained_variance, value_diagnostics
from ppoctl.ppo.value_loss import clipped_value_losses
from ppoctl.stages.objective import LossInputs, Term, Terms
from ppoctl.stages.updates import UpdateStage, UpdateTrace


@dataclass(frozen=True)
class ClippedErrors:
    """Clipped squared errors of new values against fixed returns."""

    old_values: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    clip: float | None
    needs_entropy: bool = False

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        values = outputs.primary if outputs.values is None else outputs.values
        old_values, returns = outputs.of(self.old_values), outputs.of(self.returns)
        return clipped_value_losses(values, old_values, returns, mask, clip=self.clip)


@dataclass(frozen=True, kw_only=True)
class CriticUpdateStage(UpdateStage):
    """All epochs of the critic. They run before the epochs of the actor. The targets are fixed, so the order does not
    change results."""

    clip: float | None
    scale: float
    aggregation: Aggregation
    name: str = "critic_update"

    def run(self, critic: State, rollouts: Rollouts, values: Values, advantages: Advantages) -> Update:
        returns = returns_of(advantages)
        errors = ClippedErrors(values.values, returns, self.clip)
        objective = Terms((Term(errors, advantages.mask, coef=self.scale, aggregation=self.aggregation),))
        trained = self.train(critic, rollouts, objective, read=(rollouts, values, advantages))
        diagnostics = [
            value_diagnostics(
                result.outputs.primary,
                values.values[minibatch.rows],
                returns[minibatch.rows],
                advantages.mask[minibatch.rows],
                clip=self.clip,
            )
            for minibatch, result in trained.steps
        ]
        step_metrics = {
            **self._before_the_update(values, advantages),
            metric_registry.VALUE_EXPLAINED_VARIANCE_LAST_EPOCH.name: _explained_as_last_seen(
                trained, values, advantages
            ),
        }
        return trained.record("value", diagnostics, of_the_step=step_metrics)

    def _before_the_update(self, values: Values, advantages: Advantages) -> dict[str, float]:
        """Return explained variance and related metrics over all tokens of the step, from the values before the
        update."""
        returns = returns_of(advantages)
        metrics = value_diagnostics(values.values, values.values, returns, advantages.mask, clip=self.clip)
        names = ("explained_variance", "value_mean", "return_mean", "return_std", "value_error")
        return {metric_registry.named("value", name): metrics[name] for name in names}


def returns_of(advantages: Advantages) -> Float[Tensor, "B R"]:
    """Return the returns, which the critic learns. If they are missing, the step function trains a critic with an
    estimator that has none."""
    assert advantages.returns is not None, "the critic learns returns, which the estimator did not compute"
    return advantages.returns


def _explained_as_last_seen(trained: UpdateTrace, values: Values, advantages: Advantages) -> float:
    """Return the explained variance of the values that the last epoch computed.

    The last epoch has computed these values anyway. The values of the updated critic would cost a forward pass over
    all rows.
    """
    seen = values.values.clone()
    for minibatch, result in trained.steps:
        seen[minibatch.rows] = result.outputs.primary.to(seen)
    return float(explained_variance(seen, returns_of(advantages), advantages.mask))
