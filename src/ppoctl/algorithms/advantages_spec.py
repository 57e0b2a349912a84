"""Spec of the advantages: 50-advantages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ppoctl.algorithms.estimators.kinds import metrics_of
from ppoctl.algorithms.kl_use import NO_REFERENCE, kl_use, reported_kl
from ppoctl.algorithms.stage_spec import SHAPING_KEYS, ReportedMetric, StageParts, StageSpec, always
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core import metric_registry as metrics
from ppoctl.rewards.shaping_tables import NoMoments

if TYPE_CHECKING:
    from ppoctl.core.batch.records import Advantages
    from ppoctl.store.stage_runner import Stage


@dataclass(frozen=True)
class AdvantagesSpec(StageSpec["Advantages"]):
    """50-advantages: reward shaping, the KL penalty in the reward, advantages and whitening."""

    kind: ClassVar[str] = "advantages"
    keys: ClassVar[tuple[str, ...]] = (
        "ppo.advantages", "ppo.whiten_rewards", "ppo.truncated", "ppo.kl", "ppo.critic_only_until", *SHAPING_KEYS,
    )  # fmt: skip
    excluded_keys: ClassVar[tuple[str, ...]] = ()
    reports_metrics: bool = True
    """Whether the stage reports metrics. A second stage in a step reports none, because its rows are others."""
    whitens: bool = True
    """Whether the stage whitens advantages if the recipe requires it. Otherwise a later stage whitens them."""

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        if not self.whitens:
            yield "not whitened"
        if recipe.reward.overlong is not None and recipe.reward.overlong.max_tokens is None:
            yield f"{recipe.rollout.max_new_tokens} tokens"

        if weights := _component_weights(recipe):
            yield f"weights {dict(weights)}"

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        if not self.reports_metrics:
            return ()
        return (
            *always(
                metrics.REWARD_SHAPED_MEAN, metrics.ADVANTAGE_RAW_MEAN, metrics.ADVANTAGE_RAW_STD,
                metrics.ADVANTAGE_RAW_ABS_MAX, metrics.TRAINED_SEQS, metrics.TRAINED_TOKENS,
            ),
            *_of_shaping(recipe),
            *_of_truncated(recipe),
            *reported_kl(recipe, in_update=False),
            _measured_kl(recipe),
            _trained(recipe),
            *_of_estimators(recipe),
        )  # fmt: skip

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        return {
            "returns": recipe.ppo.advantages.trains_critic,
            "shaped": True,
            "kl_coef": kl_use(recipe).adapts,
            "trains_actor": recipe.ppo.critic_only_until is not None,
        }

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Advantages]":
        from ppoctl.algorithms.stages.advantages import AdvantagesStage
        from ppoctl.algorithms.stages.critic_first import CriticFirst
        from ppoctl.algorithms.stages.shaping import shaping_steps

        until = recipe.ppo.critic_only_until
        return AdvantagesStage(
            reward_steps=shaping_steps(recipe.reward, max_new_tokens=recipe.rollout.max_new_tokens),
            estimator=recipe.ppo.advantages.estimator(),
            whitened=self.whitens and recipe.ppo.advantages.whiten,
            whitens_rewards=recipe.ppo.whiten_rewards,
            truncated=recipe.ppo.truncated,
            penalty=recipe.ppo.kl.build(),
            fingerprint=self.fingerprint(recipe),
            critic_first=None if until is None else CriticFirst(until.explained_variance, until.at_most),
            reports_metrics=self.reports_metrics,
            name=self.name,
            component_weights=_component_weights(recipe),
        )


def _component_weights(recipe: StepRecipe) -> Mapping[str, float]:
    """Return the weight of each component of the reward; empty if the estimator does not read components."""
    return recipe.reward.component_weights if recipe.ppo.advantages.reads_components else {}


def _of_shaping(recipe: StepRecipe) -> Iterator[ReportedMetric]:
    reward = recipe.reward
    has_moments = reward.moments != NoMoments(kind="none")
    steps = {
        metrics.REWARD_CLAMPED_FRAC: ("scale", reward.scale is not None),
        metrics.REWARD_CLIPPED_FRAC: ("clip", reward.clip is not None),
        metrics.REWARD_MOMENTS_MEAN: ("moments", has_moments),
        metrics.REWARD_MOMENTS_STD: ("moments", has_moments),
        metrics.REWARD_UNFINISHED_MEAN: ("unfinished_factor", reward.unfinished_factor != 1.0),
        metrics.REWARD_OVERLONG_MEAN: ("overlong", reward.overlong is not None),
        metrics.REWARD_LENGTH_MEAN: ("length_penalty", reward.length_penalty is not None),
    }
    for metric, (key, is_on) in steps.items():
        needs = f"requires `reward.{key}`, which is not set"
        yield ReportedMetric(metric, is_on, needs, hint="ppoctl recipes metrics")


def _of_truncated(recipe: StepRecipe) -> Iterator[ReportedMetric]:
    wanted = {metrics.ADVANTAGE_BOOTSTRAP_MEAN: "bootstrap", metrics.ADVANTAGE_FILTERED_FRAC: "filter"}
    for metric, value in wanted.items():
        needs = f"requires `ppo.truncated` = `{value}`"
        yield ReportedMetric(metric, recipe.ppo.truncated == value, needs, (("ppo", "truncated"),))


def _measured_kl(recipe: StepRecipe) -> ReportedMetric:
    use = kl_use(recipe)
    fixed = ("requires an adaptive coefficient, but it is fixed", (("ppo", "kl", "adaptive"),))
    return ReportedMetric(metrics.KL_MEASURED, use.adapts, *(fixed if use.is_on else NO_REFERENCE))


def _trained(recipe: StepRecipe) -> ReportedMetric:
    key = ("ppo", "critic_only_until")
    needs = f"requires `{'.'.join(key)}`, which is not set"
    return ReportedMetric(metrics.POLICY_TRAINED, recipe.ppo.critic_only_until is not None, needs, (key,))


def _of_estimators(recipe: StepRecipe) -> Iterator[ReportedMetric]:
    for each in metrics_of(recipe.ppo.advantages):
        yield ReportedMetric(each.metric, each.is_on, f"requires {each.needs}", (("ppo", "advantages", "kind"),))


ADVANTAGES = AdvantagesSpec("advantages")
