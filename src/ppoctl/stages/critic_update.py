"""60-critic_update: the critic learns the returns."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch.lineage import next_lineage
from ppoctl.batch.records import Advantages, Record, Rollouts, State, Update, Values
from ppoctl.ports import Models
from ppoctl.ppo.diagnostics import value_diagnostics
from ppoctl.ppo.value_loss import clipped_value_loss
from ppoctl.stages.updates import MinibatchPlan, Trained


@dataclass(frozen=True)
class ValueObjective:
    """Clipped squared error of new values against fixed returns."""

    old_values: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    mask: Bool[Tensor, "B R"]
    clip: float | None
    scale: float
    needs_entropy: bool = False

    def __call__(
        self,
        rows: Int[Tensor, " m"],
        outputs: Float[Tensor, "m R"],
        entropy: Float[Tensor, "m R"] | None,  # noqa: ARG002 - the port's signature; values have none
        num_tokens_global: int,
    ) -> Float[Tensor, ""]:
        device = outputs.device
        loss = clipped_value_loss(
            outputs,
            self.old_values[rows].to(device),
            self.returns[rows].to(device),
            self.mask[rows].to(device),
            clip=self.clip,
            num_tokens_global=num_tokens_global,
        )
        return loss * self.scale


@dataclass(frozen=True)
class CriticUpdateStage:
    """Every epoch of the critic, before the actor moves: targets are fixed, so the order of roles does not matter."""

    models: Models
    plan: MinibatchPlan
    clip: float | None
    scale: float
    fingerprint: str
    name: str = "critic_update"

    def run(self, critic: State, rollouts: Rollouts, values: Values, advantages: Advantages) -> Update:
        step = critic.step + 1
        inputs = (rollouts.identity, values.identity, advantages.identity)
        minibatches = self.plan.minibatches(critic, step=step, mask=advantages.mask)
        after = State(
            role="critic",
            step=step,
            updates=critic.updates + len(minibatches),
            lineage=next_lineage(critic, inputs, self.fingerprint),
        )
        objective = ValueObjective(values.values, advantages.returns, advantages.mask, self.clip, self.scale)
        with self.models.advancing(critic, to=after) as engine:
            results = engine.update(rollouts.sequences, minibatches, objective)
        diagnostics = [
            value_diagnostics(
                result.outputs,
                values.values[minibatch.rows],
                advantages.returns[minibatch.rows],
                advantages.mask[minibatch.rows],
                clip=self.clip,
            )
            for minibatch, result in zip(minibatches, results, strict=True)
        ]
        trained = Trained(critic, after, minibatches, results, diagnostics)
        return trained.record(prefix="value", of_the_step=self._of_the_step(values, advantages))

    def result(self, record: Record) -> State:
        assert isinstance(record, Update)
        return record.state

    def _of_the_step(self, values: Values, advantages: Advantages) -> dict[str, float]:
        """Explained variance and the like over all tokens of the step at once, from the values before the update."""
        whole = value_diagnostics(values.values, values.values, advantages.returns, advantages.mask, clip=self.clip)
        kept = ("explained_variance", "value_mean", "return_mean", "return_std", "value_error")
        return {metrics.named("value", name): whole[name] for name in kept}
