"""70-actor_update with a value head on the actor's model: one joint loss trains policy and value head.

loss = terms of the policy + coef x scale x value loss
"""

from dataclasses import dataclass

from ppoctl.algorithms.formulas.aggregation import Aggregation
from ppoctl.algorithms.stages.actor_update import ActorUpdateStage
from ppoctl.algorithms.stages.critic_update import ValueTargets, value_targets
from ppoctl.algorithms.stages.objective import Term
from ppoctl.algorithms.stages.updates import UpdateTrace
from ppoctl.algorithms.stages.values import values_of
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import Advantages, Logprobs


@dataclass(frozen=True, kw_only=True)
class JointUpdateStage(ActorUpdateStage):
    """All epochs of the actor and its value head. A correction changes the terms of the policy only."""

    value_clip: float | None
    value_scale: float
    value_coef: float
    """Factor of the value loss in the joint loss. `value/loss` does not contain it."""
    value_aggregation: Aggregation

    def more_terms(self, logprobs: Logprobs, advantages: Advantages) -> list[Term]:
        errors = self._targets(logprobs, advantages).errors
        coef = self.value_coef * self.value_scale
        return [Term(errors, advantages.mask, coef=coef, aggregation=self.value_aggregation, name="value")]

    def more_metrics(
        self, trained: UpdateTrace, logprobs: Logprobs, advantages: Advantages, by_term: dict[str, float]
    ) -> dict[str, float]:
        targets = self._targets(logprobs, advantages)
        clipped = [targets.diagnostics(*step)["clip_frac"] for step in trained.steps]
        return {
            **targets.of_the_step(trained),
            metric_registry.VALUE_CLIP_FRAC.name: sum(clipped) / len(clipped),
            metric_registry.VALUE_LOSS.name: by_term[metric_registry.POLICY_VALUE_LOSS.name] / self.value_coef,
        }

    def _targets(self, logprobs: Logprobs, advantages: Advantages) -> ValueTargets:
        return value_targets(values_of(logprobs), advantages, self.value_clip)
