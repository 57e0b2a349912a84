"""Construction of the correction stage from the recipe's tables about sampler/trainer differences."""

from collections.abc import Iterator
from functools import partial

from ppoctl.ppo import correction as ppo
from ppoctl.recipe.schema import (
    IcePop,
    NoCorrection,
    RatioRejection,
    Recipe,
    SequenceMask,
    TruncatedImportance,
    TruncatedSequenceImportance,
)
from ppoctl.stages.correction import CorrectionStage, Keep, Weigh


def correction_of(recipe: Recipe, fingerprint: str) -> CorrectionStage | None:
    """Return the correction stage; None if the recipe has neither a correction nor a rejection."""
    if not recipe.ppo.corrects_rollouts:
        return None
    table = recipe.ppo.rollout_correction
    return CorrectionStage(
        weigh=_weigh(recipe),
        bounded=isinstance(table, TruncatedImportance | TruncatedSequenceImportance | IcePop),
        keeps=tuple(_keeps(recipe)),
        normalize=not isinstance(table, NoCorrection) and table.normalize,
        fingerprint=fingerprint,
    )


def _weigh(recipe: Recipe) -> Weigh:
    table = recipe.ppo.rollout_correction
    if isinstance(table, TruncatedImportance):
        return partial(ppo.truncated_weights, min_ratio=table.min_ratio, max_ratio=table.max_ratio)
    if isinstance(table, TruncatedSequenceImportance):
        return partial(ppo.truncated_sequence_weights, min_ratio=table.min_ratio, max_ratio=table.max_ratio)
    if isinstance(table, IcePop):
        return partial(ppo.inside_weights, min_ratio=table.min_ratio, max_ratio=table.max_ratio)
    return ppo.plain_weights if isinstance(table, SequenceMask) else ppo.unit_weights


def _keeps(recipe: Recipe) -> Iterator[Keep]:
    mask, rejection = recipe.ppo.rollout_correction, recipe.ppo.rollout_rejection
    if isinstance(mask, SequenceMask):
        yield partial(ppo.kept_by_ratio, level="sequence_mean", min_ratio=mask.min_ratio, max_ratio=mask.max_ratio)
    if isinstance(rejection, RatioRejection):
        low, high, level = rejection.min_ratio, rejection.max_ratio, rejection.level
        if rejection.statistic == "k1":
            yield partial(ppo.kept_by_ratio, level=level, min_ratio=low, max_ratio=high)
        else:
            assert rejection.max is not None, "a rule of the recipe requires `max`"
            statistic, limit = rejection.statistic, rejection.max
            yield partial(ppo.kept_by_divergence, statistic=statistic, level=level, max_nats=limit)
    if recipe.ppo.max_sequence_gap is not None:
        yield partial(ppo.kept_by_gap, max_gap=recipe.ppo.max_sequence_gap)
