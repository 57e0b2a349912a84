"""Stages of a step that compute the KL from the reference. Every other module asks `kl_use`."""

from dataclasses import dataclass

from ppoctl.algorithms.stage_spec import ReportedMetric
from ppoctl.algorithms.stages.kl_table import NoKl
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core import metric_registry as metrics


@dataclass(frozen=True)
class KlUse:
    """Stages that compute the KL from the reference, and how."""

    is_on: bool = False
    """Whether a reference is loaded."""
    is_estimated: bool = False
    """Whether the KL is estimated from log-probs of the reference."""
    is_read_by_update: bool = False
    """Whether the policy update receives the log-probs of the reference."""
    is_full_before: bool = False
    """Whether the forward pass of the policy before the update computes the KL over the whole vocabulary."""
    is_full_in_update: bool = False
    """Whether the policy update computes the KL over the whole vocabulary."""
    is_reported_by_update: bool = False
    """Whether the policy update reports the metrics of the KL, because no earlier stage can compute it."""
    adapts: bool = False
    """Whether the coefficient adapts to the measured KL."""


def kl_use(recipe: StepRecipe) -> KlUse:
    """Return the stages that compute the KL of the recipe's penalty."""
    kl = recipe.ppo.kl
    if isinstance(kl, NoKl):
        return KlUse()
    is_full, adapts = kl.estimator == "full", kl.adaptive is not None
    is_full_before = is_full and (kl.place == "reward" or adapts)
    return KlUse(
        is_on=True,
        is_estimated=not is_full,
        is_read_by_update=not is_full and kl.place == "loss",
        is_full_before=is_full_before,
        is_full_in_update=is_full and kl.place == "loss",
        is_reported_by_update=not is_full_before if is_full else recipe.ppo.old_logprobs == "current",
        adapts=adapts,
    )


NO_REFERENCE = ("requires a reference, but none is loaded", (("ppo", "kl", "place"),))
"""Text and key of a conflict: a metric of the KL from the reference, in a recipe without a reference."""


def reported_kl(recipe: StepRecipe, *, in_update: bool) -> tuple[ReportedMetric, ...]:
    """Return the metrics of the KL from the reference, which the first stage that knows the KL reports: the policy
    update (`in_update`) or an earlier stage."""
    use = kl_use(recipe)
    is_here = use.is_on and use.is_reported_by_update == in_update
    every = (metrics.KL_REFERENCE_MEAN, metrics.KL_CLAMPED_FRAC, metrics.KL_COEF, metrics.KL_PENALTY_MEAN)
    return tuple(ReportedMetric(metric, is_here, *NO_REFERENCE) for metric in every)
