"""Rules about the correction of sampler and trainer log-probs that differ: weights, and rejection of tokens.

See `all_rules`.
"""

from collections.abc import Iterator

from ppoctl.algorithms.stages.correction_table import ImportanceWeights, RatioRejection
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.recipe.schema import Recipe

_TABLE: KeyPath = ("ppo", "rollout_rejection")
_RATIO_BOUNDS = ("min_ratio", "max_ratio")


def check_rejection_bounds(recipe: Recipe) -> Iterator[Finding]:
    table = recipe.ppo.rollout_rejection
    if not isinstance(table, RatioRejection):
        return
    own, others = (_RATIO_BOUNDS, ("max",)) if table.statistic == "k1" else (("max",), _RATIO_BOUNDS)
    for name in others:
        if getattr(table, name) is not None:
            yield conflict(
                f"{table.statistic} is bounded by {_words(own)}, so `{name}` has no effect",
                ((*_TABLE, name), (*_TABLE, "statistic")),
            )
    if all(getattr(table, name) is None for name in own):
        yield conflict(
            f"{table.statistic} has no bound: set {_words(own)}",
            ((*_TABLE, "statistic"), (*_TABLE, "kind")),
            f"--set ppo.rollout_rejection.{own[-1]}={2.0 if table.statistic == 'k1' else 0.01}",
        )


def check_normalization_is_on(recipe: Recipe) -> Iterator[Finding]:
    table = recipe.ppo.rollout_correction
    if isinstance(table, ImportanceWeights) and table.normalize_over != "kept_tokens" and not table.normalize:
        yield conflict(
            "`normalize_over` has no effect, because the weights are not divided by their mean",
            (("ppo", "rollout_correction", "normalize_over"), ("ppo", "rollout_correction", "normalize")),
            "--set ppo.rollout_correction.normalize=true",
        )


def _words(names: tuple[str, ...]) -> str:
    return " or ".join(f"`{name}`" for name in names)
