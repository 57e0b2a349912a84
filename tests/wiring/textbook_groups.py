"""Advantages of the textbook that compare the responses to a prompt, from the papers alone, in float64."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray

KINDS = ("grpo", "rloo", "opo", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline")
WHITENED = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def group_advantages(
    keys: Mapping[str, Any],
    scores: Sequence[Array],
    weights: Sequence[float],
    valid: Array,
    lengths: Array,
    samples: int,
) -> tuple[Array, float]:
    """Return the advantage of each response before whitening, and the fraction of prompts without two different
    scores. `scores` and `weights` have one entry per component; only gdpo has several."""
    advantages, equal = np.zeros(len(valid)), []
    for first in range(0, len(valid), samples):
        rows = [row for row in range(first, first + samples) if valid[row]]
        differs = [len(rows) > 1 and bool(np.ptp(column[rows]) > 0) for column in scores]
        equal.append(not any(differs))
        for column, weight, is_different in zip(scores, weights, differs, strict=True):
            if is_different:
                advantages[rows] += weight * of_group(keys, column[rows], lengths[rows])
    if keys.get("scale") == "batch":
        advantages /= scores[0][valid].std(ddof=1) + 1e-6
    return advantages, float(np.mean(equal))


def of_group(keys: Mapping[str, Any], scores: Array, lengths: Array) -> Array:
    """Return the advantages of one group: arXiv:2402.03300 (grpo), 2503.20783 (not scaled), 2402.14740 (rloo),
    2505.23585 (opo), 2503.19595 (pass@k), 2501.03262 (REINFORCE++ with baseline), 2601.05242 (gdpo)."""
    kind, is_scaled = keys["kind"], keys.get("scale", "none") == "group" or keys["kind"] == "gdpo"
    if kind == "opo":
        return scores - (lengths * scores).sum() / lengths.sum()
    if kind == "grpo_passk":
        ordered = np.sort(scores)
        lead = np.where(scores == ordered[-1], ordered[-1] - ordered[-2], 0.0)
        return np.asarray(lead / (scores.std(ddof=1) + 1e-6) if is_scaled else lead)
    if kind == "rloo" or keys.get("leave_one_out"):
        others = [np.delete(scores, row) for row in range(len(scores))]
        found = scores - [other.mean() for other in others]
        stds = [other.std(ddof=1) if np.ptp(other) > 0 else 0.0 for other in others]
        return np.asarray([a / (std + 1e-6) if is_scaled and std else a for a, std in zip(found, stds, strict=True)])
    centered = scores - scores.mean()
    return np.asarray(centered / (scores.std(ddof=1) + 1e-6) if is_scaled else centered)
