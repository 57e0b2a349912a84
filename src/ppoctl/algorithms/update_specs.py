"""Specs of the updates: 60-critic_update and 70-actor_update."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ppoctl.algorithms.distribution import DISTRIBUTION_KEYS, scored_distribution
from ppoctl.algorithms.forward_specs import SAMPLER_GAP
from ppoctl.algorithms.kl_use import kl_use, reported_kl
from ppoctl.algorithms.role_model import trainable_of
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.sizes import (
    critic_only_steps,
    epochs,
    learning_rate_of,
    minibatch_seqs,
    optimizer_of,
    planned_updates,
    segments_per_response,
    updates_per_step,
    updates_per_tick,
    warmup_updates,
)
from ppoctl.algorithms.stage_spec import (
    SHAPING_KEYS,
    UPDATE,
    ModelPass,
    ReportedMetric,
    StageParts,
    StageSpec,
    always,
)
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core import metric_registry as metrics

if TYPE_CHECKING:
    from ppoctl.algorithms.stages.updates import MinibatchPlan
    from ppoctl.core.batch.records import State
    from ppoctl.store.stage_runner import Stage


def _read_by_update(recipe: StepRecipe, role: str, aggregation: str) -> Iterator[str]:
    """Yield the number of optimizer steps if a learning rate or the size of minibatches depends on it, and the
    response length if a loss divides by it."""
    table = optimizer_of(recipe, role)
    if table.lr_schedule != "constant":
        yield f"{table.lr_decay_updates or planned_updates(recipe, role)} updates"
    if table.lr_warmup_frac is not None:
        yield f"{warmup_updates(recipe, role)} updates of warm-up"
    if table.lr_ticks == "step":
        yield f"{updates_per_tick(recipe, role)} updates a tick, after {critic_only_steps(recipe, role)} steps"
    if segments_per_response(recipe) > 1:
        yield f"{updates_per_step(recipe, role)} updates a step"
    if aggregation == "fixed_length":
        yield f"{recipe.rollout.max_new_tokens} tokens"


@dataclass(frozen=True)
class UpdateSpec(StageSpec["State"]):
    """An update of one role."""

    kind: ClassVar[str] = UPDATE
    role: str

    def read_keys(self) -> tuple[str, ...]:
        return (*self.keys, *(f"{self.role}.{key}" for key in ("optimizer", "train", "freeze")))


VALUE_METRICS = (
    metrics.VALUE_EXPLAINED_VARIANCE, metrics.VALUE_EXPLAINED_VARIANCE_LAST_EPOCH, metrics.VALUE_CLIP_FRAC,
    metrics.VALUE_MEAN, metrics.VALUE_RETURN_MEAN, metrics.VALUE_RETURN_STD, metrics.VALUE_ERROR, metrics.VALUE_LOSS,
)  # fmt: skip
"""Metrics of every update that trains values."""


@dataclass(frozen=True)
class ValueUpdateSpec(UpdateSpec):
    """60-critic_update: the critic learns the returns."""

    keys: ClassVar[tuple[str, ...]] = (
        "seed", "model", "ppo.critic_epochs", "ppo.epochs", "ppo.minibatch_seqs",
        "ppo.minibatch_order", "ppo.critic_minibatch_seqs", "ppo.value_loss",
    )  # fmt: skip
    role: str = "critic"

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        return _read_by_update(recipe, self.role, recipe.ppo.value_loss.aggregation)

    def passes(self, recipe: StepRecipe) -> tuple[ModelPass, ...]:
        return (ModelPass("train", self.role),)

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return always(*VALUE_METRICS, metrics.VALUE_GRAD_NORM, metrics.VALUE_LR)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[State]":
        from ppoctl.algorithms.formulas.aggregation import aggregation
        from ppoctl.algorithms.stages.critic_update import CriticUpdateStage

        loss = recipe.ppo.value_loss
        return CriticUpdateStage(
            models=parts.models,
            plan=_minibatch_plan(recipe, self.role),
            clip=loss.clip,
            scale=loss.scale,
            aggregation=aggregation(loss.aggregation, max_new_tokens=recipe.rollout.max_new_tokens),
            fingerprint=self.fingerprint(recipe),
            name=self.name,
        )


@dataclass(frozen=True)
class PolicyUpdateSpec(UpdateSpec):
    """70-actor_update: the policy follows the advantages."""

    keys: ClassVar[tuple[str, ...]] = (
        "seed", "model", *DISTRIBUTION_KEYS, "ppo.epochs", "ppo.minibatch_seqs",
        "ppo.minibatch_order", "ppo.policy_loss", "ppo.kl", "actor.router_aux_loss_coef", "actor.router_bias_rate",
    )  # fmt: skip
    excluded_keys: ClassVar[tuple[str, ...]] = SHAPING_KEYS
    role: str = "actor"

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        return _read_by_update(recipe, self.role, recipe.ppo.policy_loss.aggregation)

    def passes(self, recipe: StepRecipe) -> tuple[ModelPass, ...]:
        return (ModelPass("train", self.role, with_reference=kl_use(recipe).is_full_in_update),)

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        is_gap_new = recipe.ppo.old_logprobs != "trainer"
        return (
            *always(
                metrics.POLICY_LOSS, metrics.POLICY_SURROGATE_LOSS, metrics.POLICY_GRAD_NORM, metrics.POLICY_LR,
                metrics.POLICY_APPROX_KL, metrics.POLICY_RATIO_MEAN, metrics.POLICY_RATIO_P01,
                metrics.POLICY_RATIO_P50, metrics.POLICY_RATIO_P99, metrics.POLICY_RATIO_MAX,
                metrics.POLICY_ENTROPY_MEAN,
            ),
            *_of_clips(recipe),
            _of_staleness(recipe),
            *_of_terms(recipe),
            _of_adapters(recipe),
            *reported_kl(recipe, in_update=True),
            *(ReportedMetric(metric, is_gap_new) for metric in SAMPLER_GAP),
        )  # fmt: skip

    def reports_from(self, recipe: StepRecipe) -> int:
        until = recipe.ppo.critic_only_until
        return 1 if until is None else until.at_most + 1

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        return {"gap": recipe.ppo.old_logprobs != "trainer"}

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[State]":
        from ppoctl.algorithms.stages.actor_update import ActorUpdateStage

        return ActorUpdateStage(**self.stage_settings(recipe, parts))

    def stage_settings(self, recipe: StepRecipe, parts: StageParts) -> dict[str, Any]:
        """Return the settings of the stage by name."""
        from ppoctl.algorithms.formulas.aggregation import aggregation

        loss = recipe.ppo.policy_loss
        return {
            "models": parts.models,
            "plan": _minibatch_plan(recipe, self.role),
            "scored": scored_distribution(recipe),
            "loss": loss.build(),
            "aggregation": aggregation(loss.aggregation, max_new_tokens=recipe.rollout.max_new_tokens),
            "entropy_coef": loss.entropy_coef,
            "positive_nll_coef": loss.positive_nll_coef,
            "penalty": recipe.ppo.kl.build(),
            "with_full_kl": kl_use(recipe).is_full_in_update,
            "may_be_stale": recipe.rollout.may_be_stale,
            "fingerprint": self.fingerprint(recipe),
            "name": self.name,
        }


def _of_clips(recipe: StepRecipe) -> Iterator[ReportedMetric]:
    loss = recipe.ppo.policy_loss
    needs = f"describes a clip that the loss `{loss.kind}` does not have"
    for metric in (
        metrics.POLICY_CLIP_FRAC, metrics.POLICY_CLIP_FRAC_HIGH, metrics.POLICY_CLIP_FRAC_LOW,
        metrics.POLICY_DUAL_CLIP_FRAC, metrics.POLICY_CLAMPED_RATIO_MIN, metrics.POLICY_CLAMPED_RATIO_MAX,
    ):  # fmt: skip
        yield ReportedMetric(metric, metric in loss.metrics, needs, (("ppo", "policy_loss", "kind"),))
    own, needs = metrics.POLICY_CUSTOM, "requires a loss of your own"
    yield ReportedMetric(own, own in loss.metrics, needs, (("ppo", "policy_loss", "kind"),))


def _of_terms(recipe: StepRecipe) -> Iterator[ReportedMetric]:
    """Yield the metrics of the terms that a recipe can add to the loss."""
    loss = recipe.ppo.policy_loss
    for metric, key in (
        (metrics.POLICY_ENTROPY_LOSS, "entropy_coef"),
        (metrics.POLICY_NLL_LOSS, "positive_nll_coef"),
        (metrics.POLICY_NLL_TOKENS, "positive_nll_coef"),
    ):
        path = ("ppo", "policy_loss", key)
        needs, hint = f"requires `{'.'.join(path)}` above 0", f"--set {'.'.join(path)}=0.001"
        yield ReportedMetric(metric, getattr(loss, key) > 0, needs, (path,), hint)
    in_loss = "requires a KL penalty in the loss, but there is none"
    yield ReportedMetric(metrics.POLICY_KL_LOSS, recipe.ppo.kl.place == "loss", in_loss, (("ppo", "kl", "place"),))
    no_head, on = "requires a value head on the actor's model, but there is none", ("critic", "on")
    yield ReportedMetric(metrics.POLICY_VALUE_LOSS, recipe.value_head is not None, no_head, (on,))


def _of_staleness(recipe: StepRecipe) -> ReportedMetric:
    needs = "requires `rollout.ahead` above 0 or `rollout.tokens_per_step`: otherwise no response is old"
    keys, is_on = (("rollout", "ahead"), ("rollout", "tokens_per_step")), recipe.rollout.may_be_stale
    return ReportedMetric(metrics.POLICY_STALENESS_MAX, is_on, needs, keys, "--set rollout.ahead=1")


def _of_adapters(recipe: StepRecipe) -> ReportedMetric:
    has_adapters = trainable_of(recipe, POLICY).lora is not None
    needs, key = "requires adapters, but the actor has none", ("actor", "train")
    return ReportedMetric(metrics.POLICY_MERGE_ERROR, has_adapters, needs, (key,), "--set 'actor.train={lora={}}'")


def _minibatch_plan(recipe: StepRecipe, role: str) -> "MinibatchPlan":
    from ppoctl.algorithms.stages.updates import MinibatchPlan, OptimizerSchedule
    from ppoctl.core.ports import OptimizerStep

    table = optimizer_of(recipe, role)
    constant = OptimizerStep(table.lr, table.weight_decay, table.grad_clip, table.beta1, table.beta2, table.eps)
    steps_before = critic_only_steps(recipe, role) if table.lr_ticks == "step" else None
    schedule = OptimizerSchedule(learning_rate_of(recipe, role), constant, steps_before)
    seed = recipe.seed if recipe.ppo.minibatch_order == "shuffled" else None
    at_most = updates_per_step(recipe, role) // epochs(recipe, role) if segments_per_response(recipe) > 1 else None
    return MinibatchPlan(epochs(recipe, role), minibatch_seqs(recipe, role), seed, schedule, at_most)


CRITIC_UPDATE = ValueUpdateSpec("critic_update")
ACTOR_UPDATE = PolicyUpdateSpec("actor_update")
