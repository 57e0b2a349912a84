"""Specs of the forward passes over rollouts, and of the correction that compares their log-probs: 30-values,
40-logprobs and 45-correction."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ppoctl.algorithms.distribution import DISTRIBUTION_KEYS, scored_distribution
from ppoctl.algorithms.kl_use import kl_use
from ppoctl.algorithms.role_model import shared_layers
from ppoctl.algorithms.roles import REFERENCE
from ppoctl.algorithms.stage_spec import SHAPING_KEYS, ModelPass, ReportedMetric, StageParts, StageSpec
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core import metric_registry as metrics

if TYPE_CHECKING:
    from ppoctl.algorithms.trace import RunStage
    from ppoctl.core.batch.records import Correction, Logprobs, Rollouts, Values
    from ppoctl.store.stage_runner import Stage

SAMPLER_GAP = (
    metrics.MISMATCH_GAP_K3, metrics.MISMATCH_GAP_MEAN_ABS, metrics.MISMATCH_GAP_MAX_ABS, metrics.MISMATCH_ESS_FRAC,
    metrics.MISMATCH_SEQUENCE_GAP_MEAN, metrics.MISMATCH_SEQUENCE_GAP_MAX,
)  # fmt: skip
"""Metrics of the sampler/trainer log-prob difference. The first stage that has the trainer's log-probs reports
them."""


@dataclass(frozen=True)
class ValuesSpec(StageSpec["Values"]):
    """30-values: the value of the state before each response token."""

    kind: ClassVar[str] = "values"
    keys: ClassVar[tuple[str, ...]] = ("model",)
    role: str = "critic"

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        if recipe.ppo.truncated == "bootstrap":
            # `filter` and `terminal` give the same fingerprint, so a run that stopped because `filter` left no
            # response can continue with `terminal`.
            yield "bootstrap"

    def passes(self, recipe: StepRecipe) -> tuple[ModelPass, ...]:
        return (ModelPass("forward", self.role),)

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        return {"behind": recipe.ppo.truncated == "bootstrap"}

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Values]":
        from ppoctl.algorithms.stages.values import ValuesStage

        return ValuesStage(
            models=parts.models,
            truncated=recipe.ppo.truncated,
            fingerprint=self.fingerprint(recipe),
            name=self.name,
        )


@dataclass(frozen=True)
class LogprobsSpec(StageSpec["Logprobs"]):
    """40-logprobs: old log-probs for the ratios, and log-probs of the reference."""

    kind: ClassVar[str] = "logprobs"
    keys: ClassVar[tuple[str, ...]] = (
        "model", *DISTRIBUTION_KEYS, "ppo.kl", "ppo.old_logprobs", "actor.router_replay",
    )  # fmt: skip
    excluded_keys: ClassVar[tuple[str, ...]] = SHAPING_KEYS
    role: str = "actor"

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        if recipe.value_head is not None:
            yield "values"
            if recipe.ppo.truncated == "bootstrap":
                yield "bootstrap"

    def passes(self, recipe: StepRecipe) -> tuple[ModelPass, ...]:
        use, in_one_pass = kl_use(recipe), _in_one_pass(recipe)
        own = ModelPass("forward", self.role, with_reference=use.is_full_before or in_one_pass)
        passes = (own,) if recipe.ppo.old_logprobs == "trainer" else ()
        return (*passes, ModelPass("forward", REFERENCE)) if use.is_estimated and not in_one_pass else passes

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return tuple(ReportedMetric(metric, recipe.ppo.old_logprobs == "trainer") for metric in SAMPLER_GAP)

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        use, source = kl_use(recipe), recipe.ppo.old_logprobs
        return {
            "actor": source != "current",
            "entropy": source == "trainer",
            "reference": use.is_estimated,
            "full_kl": use.is_full_before,
            "values": recipe.value_head is not None,
            "behind": recipe.value_head is not None and recipe.ppo.truncated == "bootstrap",
            "experts": recipe.actor.router_replay == "trainer",
            "input_lengths": recipe.actor.router_replay == "trainer",
        }

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Logprobs]":
        from ppoctl.algorithms.stages.logprobs import LogprobsStage
        from ppoctl.algorithms.stages.valued_logprobs import ValuedLogprobsStage

        use = kl_use(recipe)
        stage = (
            LogprobsStage
            if recipe.value_head is None
            else partial(ValuedLogprobsStage, truncated=recipe.ppo.truncated)
        )
        return stage(
            models=parts.models,
            scored=scored_distribution(recipe),
            with_reference=use.is_estimated,
            with_full_kl=use.is_full_before,
            in_one_pass=_in_one_pass(recipe),
            source=recipe.ppo.old_logprobs,
            stores_experts=recipe.actor.router_replay == "trainer",
            fingerprint=self.fingerprint(recipe),
            name=self.name,
        )


def _in_one_pass(recipe: StepRecipe) -> bool:
    """Return whether the pass that computes the old log-probs computes those of the reference too."""
    is_wanted = kl_use(recipe).is_estimated and recipe.ppo.old_logprobs == "trainer"
    return is_wanted and shared_layers(recipe) > 0


_KIND = ("ppo", "rollout_correction", "kind")
_REJECTION = (("ppo", "rollout_rejection", "kind"), ("ppo", "max_sequence_gap"))


@dataclass(frozen=True)
class CorrectionSpec(StageSpec["Correction"]):
    """45-correction: importance weights and mask of the policy's loss."""

    kind: ClassVar[str] = "correction"
    keys: ClassVar[tuple[str, ...]] = ("ppo.rollout_correction", "ppo.rollout_rejection", "ppo.max_sequence_gap")

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        ppo, kind = recipe.ppo, recipe.ppo.rollout_correction.kind
        if not ppo.corrects_rollouts:
            none = "requires a rollout correction, but none is made"
            return tuple(ReportedMetric(metric, is_on=False, needs=none, keys=(_KIND,)) for metric in _CORRECTION)
        has_bounds = kind not in ("none", "sequence_mask")
        rejects = kind == "sequence_mask" or ppo.rollout_rejection.kind != "none" or ppo.max_sequence_gap is not None
        bounds, rejection = (
            "requires bounded weights, but these have no bounds",
            "requires a rejection, but nothing is rejected",
        )
        mean, capped, rejected, dropped = _CORRECTION
        return (
            ReportedMetric(mean),
            ReportedMetric(capped, has_bounds, bounds, (_KIND,)),
            ReportedMetric(rejected, rejects, rejection, _REJECTION),
            ReportedMetric(dropped, rejects, rejection, _REJECTION),
        )

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Correction]":
        return recipe.ppo.build_correction(fingerprint=self.fingerprint(recipe), name=self.name)


_CORRECTION = (
    metrics.CORRECTION_WEIGHT_MEAN, metrics.CORRECTION_CAPPED_FRAC, metrics.CORRECTION_REJECTED_FRAC,
    metrics.CORRECTION_DROPPED_SEQS,
)  # fmt: skip


VALUES = ValuesSpec("values")
LOGPROBS = LogprobsSpec("logprobs")
CORRECTION = CorrectionSpec("correction")

Correct = Callable[["RunStage", "Rollouts", "Logprobs"], "tuple[Correction, ...]"]
"""Function that returns the correction of a step, or nothing if the step has none."""


def _corrected(run_stage: "RunStage", rollouts: "Rollouts", logprobs: "Logprobs") -> "tuple[Correction, ...]":
    return (run_stage(CORRECTION, rollouts, logprobs),)


CORRECTIONS: dict[bool, Correct] = {False: lambda *_: (), True: _corrected}
"""Whether a step corrects rollouts -> the last inputs of its actor update."""
