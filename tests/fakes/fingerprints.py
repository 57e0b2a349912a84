"""Fingerprints of all stages of PPO, with a correction, resampling and an evaluation."""

from ppoctl.algorithms.evaluation_spec import EVALUATION
from ppoctl.algorithms.pf_ppo import RESAMPLE, WHITENING
from ppoctl.algorithms.ppo import PPO_CORRECTED
from ppoctl.algorithms.trace import trace
from ppoctl.recipe.schema import Recipe

SPECS = {spec.name: spec for spec in (*trace(PPO_CORRECTED).stages, RESAMPLE, WHITENING, EVALUATION)}
STAGES = tuple(SPECS)


def stage_fingerprint(stage: str, recipe: Recipe, reward_digest: str = "") -> str:
    return SPECS[stage].fingerprint(recipe, reward_digest)


def stages_that_read(before: Recipe, after: Recipe) -> set[str]:
    """Return the stages whose fingerprints differ between two recipes."""
    return {stage for stage in STAGES if stage_fingerprint(stage, before) != stage_fingerprint(stage, after)}
