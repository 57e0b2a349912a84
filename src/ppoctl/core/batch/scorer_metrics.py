"""Names of the metrics that a scorer returns with its score."""

import re
from collections.abc import Iterable

from ppoctl.core import metric_registry
from ppoctl.core.batch.scores import Score
from ppoctl.core.errors import RewardError


def require_own_names(scores: Iterable[Score], *, then: str = "") -> None:
    """Raise RewardError if a metric that the scorer returns has the name of another metric. `then`: the end of the
    hint."""
    names = {name for score in scores for name in score.extras}
    if taken := sorted(name for name in names if not metric_registry.is_of_a_scorer(name)):
        plain = re.sub(r"[^A-Za-z0-9_-]+", "_", taken[0]).strip("_")
        raise RewardError(
            f"the reward returns a metric `{taken[0]}` in addition to its score, but `reward/{taken[0]}_mean` is the "
            "name of another metric, or not a valid name (letters, digits, `_` and `-`)",
            hint=f"return it under another name, such as `my_{plain}`{then}",
        )
