"""PPO with a value head on the actor's model (Schulman et al. 2017, eq. 9): one forward pass computes log-probs and
values, and one update trains both.

Returns and advantages are fixed before the update, as in `ppo`. The update of `ppo` that trains a critic has no
counterpart: a separate update of the value head would change the policy too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ppoctl.algorithms.forward_specs import CORRECTIONS
from ppoctl.algorithms.get_samples import ONE_ROUND, GetSamples, step_function
from ppoctl.algorithms.policy_only import policy_step
from ppoctl.algorithms.stage_spec import ReportedMetric, StageParts, always
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.algorithms.trace import StepFunction
from ppoctl.algorithms.update_specs import VALUE_METRICS, PolicyUpdateSpec
from ppoctl.core import metric_registry as metrics

if TYPE_CHECKING:
    from ppoctl.core.batch.records import State
    from ppoctl.store.stage_runner import Stage

_ON: tuple[str, ...] = ("critic", "on")


@dataclass(frozen=True)
class JointUpdateSpec(PolicyUpdateSpec):
    """70-actor_update: the policy follows the advantages, and its value head learns the returns."""

    keys: ClassVar[tuple[str, ...]] = (*PolicyUpdateSpec.keys, "ppo.value_loss", "critic")

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        yield from super().fingerprint_texts(recipe)
        if recipe.ppo.value_loss.aggregation == "fixed_length":
            yield f"{recipe.rollout.max_new_tokens} tokens of the value loss"

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        of_the_joint = {metrics.VALUE_GRAD_NORM: metrics.POLICY_GRAD_NORM, metrics.VALUE_LR: metrics.POLICY_LR}
        return (
            *super().metrics(recipe),
            *always(*VALUE_METRICS),
            *(
                ReportedMetric(
                    metric,
                    is_on=False,
                    needs=f"requires a critic with a model of its own; `{joint.name}` is that of the joint loss",
                    keys=(_ON,),
                )
                for metric, joint in of_the_joint.items()
            ),
        )

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[State]":
        from ppoctl.algorithms.formulas.aggregation import aggregation
        from ppoctl.algorithms.stages.joint_update import JointUpdateStage

        loss, settings = recipe.ppo.value_loss, self.stage_settings(recipe, parts)
        return JointUpdateStage(
            **settings | {"scored": replace(settings["scored"], values=True)},
            value_clip=loss.clip,
            value_scale=loss.scale,
            value_coef=loss.coef,
            value_aggregation=aggregation(loss.aggregation, max_new_tokens=recipe.rollout.max_new_tokens),
        )


JOINT_UPDATE = JointUpdateSpec("actor_update")


def joint(get_samples: GetSamples = ONE_ROUND, *, corrects: bool = False) -> StepFunction:
    """Return PPO with a value head on the actor's model with these samples, with or without rollout correction, which
    changes the terms of the policy only."""
    return step_function(
        "joint_corrected" if corrects else "joint", policy_step, get_samples, JOINT_UPDATE, CORRECTIONS[corrects]
    )


JOINT_CORRECTED = joint(corrects=True)
