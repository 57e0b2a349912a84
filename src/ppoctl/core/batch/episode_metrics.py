"""Metrics of the episodes of a rollout."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ppoctl.core import metric_registry
from ppoctl.core.batch.episodes import Episode

TAKEN_NAMES = tuple(
    metric.name.removeprefix("environment/").removesuffix("_mean")
    for metric in (
        metric_registry.ENVIRONMENT_TURNS_MEAN,
        metric_registry.ENVIRONMENT_OBSERVED_TOKENS_MEAN,
        metric_registry.ENVIRONMENT_CALLS_MEAN,
    )
)
"""Names that a metric of an environment must not have: `environment/NAME_mean` is the name of another metric."""


def episode_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of episodes, given as `Episode.as_json`; there must be at least one. A metric of the
    environment is the mean over the episodes that have it."""
    episodes = [Episode.from_json(row) for row in rows]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    own = {name for episode in episodes for name in episode.metrics}
    return {
        metric_registry.ENVIRONMENT_TURNS_MEAN.name: mean([len(e.turns) for e in episodes]),
        metric_registry.ENVIRONMENT_OBSERVED_TOKENS_MEAN.name: mean(
            [sum(turn.observed for turn in e.turns) for e in episodes]
        ),
        metric_registry.ENVIRONMENT_CALLS_MEAN.name: mean(
            [sum(len(turn.calls) for turn in e.turns) for e in episodes]
        ),
        metric_registry.ENVIRONMENT_MALFORMED_FRAC.name: mean(
            [any(turn.malformed for turn in e.turns) for e in episodes]
        ),
        metric_registry.ENVIRONMENT_TURN_LIMIT_FRAC.name: mean([e.end == "turns" for e in episodes]),
        metric_registry.ENVIRONMENT_FAILED_FRAC.name: mean([e.is_failed for e in episodes]),
        **{
            f"environment/{name}_mean": mean([e.metrics[name] for e in episodes if name in e.metrics])
            for name in sorted(own)
        },
    }
