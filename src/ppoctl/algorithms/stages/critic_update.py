"""60-critic_update: train the critic on the returns."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.formulas.aggregation import Aggregation
from ppoctl.algorithms.formulas.diagnostics import explained_variance, value_diagnostics
from ppoctl.algorithms.formulas.value_loss import clipped_value_losses
from ppoctl.algorithms.stages.objective import LossInputs, Term, Terms
from ppoctl.algorithms.stages.updates import UpdateStage, UpdateTrace
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import Advantages, Rollouts, State, Update, Values
from ppoctl.core.ports import Minibatch, MinibatchResult, TokenOutputs


@dataclass(frozen=True)
class ClippedErrors:
    """Clipped squared errors of new values against fixed returns."""

    old_values: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    clip: float | None
    needs_entropy: bool = False

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        old_values, returns = outputs.of(self.old_values), outputs.of(self.returns)
        return clipped_value_losses(_values_in(outputs), old_values, returns, mask, clip=self.clip)


@dataclass(frozen=True)
class ValueTargets:
    """Targets of the values of all rows of the step, and metrics of how well the values learn them."""

    advantages: Advantages
    errors: ClippedErrors

    def diagnostics(self, minibatch: Minibatch, result: MinibatchResult) -> dict[str, float]:
        """Return the metrics of the values that an optimizer step computed."""
        rows = minibatch.rows
        return value_diagnostics(
            _values_in(result.outputs),
            self.errors.old_values[rows],
            self.errors.returns[rows],
            self.advantages.mask[rows],
            clip=self.errors.clip,
        )

    def of_the_step(self, trained: UpdateTrace) -> dict[str, float]:
        """Return explained variance and related metrics over all tokens of the step, from the values before the
        update, and the explained variance of the values that the last epoch computed.

        The last epoch has computed these values anyway. The values of the updated model would cost a forward pass
        over all rows.
        """
        old, returns, mask = self.errors.old_values, self.errors.returns, self.advantages.mask
        metrics = value_diagnostics(old, old, returns, mask, clip=self.errors.clip)
        names = ("explained_variance", "value_mean", "return_mean", "return_std", "value_error")
        seen = old.clone()
        for minibatch, result in trained.steps:
            seen[minibatch.rows] = _values_in(result.outputs).to(seen)
        last_epoch = float(explained_variance(seen, returns, mask))
        return {
            **{metric_registry.named("value", name): metrics[name] for name in names},
            metric_registry.VALUE_EXPLAINED_VARIANCE_LAST_EPOCH.name: last_epoch,
        }


def value_targets(values: Values, advantages: Advantages, clip: float | None) -> ValueTargets:
    """Return the targets of an update that starts at these values."""
    return ValueTargets(advantages, ClippedErrors(values.values, returns_of(advantages), clip))


@dataclass(frozen=True, kw_only=True)
class CriticUpdateStage(UpdateStage):
    """All epochs of the critic. They run before the epochs of the actor. The targets are fixed, so the order does not
    change results."""

    clip: float | None
    scale: float
    aggregation: Aggregation
    name: str = "critic_update"

    def run(self, critic: State, rollouts: Rollouts, values: Values, advantages: Advantages) -> Update:
        targets = value_targets(values, advantages, self.clip)
        objective = Terms((Term(targets.errors, advantages.mask, coef=self.scale, aggregation=self.aggregation),))
        trained = self.train(critic, rollouts.sequences, objective, read=(rollouts, values, advantages))
        diagnostics = [targets.diagnostics(*step) for step in trained.steps]
        return trained.record("value", diagnostics, of_the_step=targets.of_the_step(trained))


def returns_of(advantages: Advantages) -> Float[Tensor, "B R"]:
    """Return the returns, which the critic learns. If they are missing, the step function trains a critic with an
    estimator that has none."""
    assert advantages.returns is not None, "the critic learns returns, which the estimator did not compute"
    return advantages.returns


def _values_in(outputs: TokenOutputs | LossInputs) -> Float[Tensor, "m R"]:
    """Return the values of a critic, or of a value head on the policy's model."""
    return outputs.primary if outputs.values is None else outputs.values
