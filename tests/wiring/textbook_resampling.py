"""PF-PPO (Zhang et al. 2024, arXiv:2409.06957) with the weights of verl: rows are sampled again by their scores."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray


def row_weights(keys: Mapping[str, Any], scores: Array, trains: Array) -> Array:
    """Return the weight of each row; rows without a token to train on have weight 0."""
    of_trained = [score for score, is_trained in zip(scores, trains, strict=True) if is_trained]
    best, worst, weights = max(of_trained), min(of_trained), np.zeros(len(scores))
    for row in np.flatnonzero(trains):
        score = scores[row]
        weights[row] = {
            "pow": abs(score) ** keys.get("power", 0.0),
            "max_min": float(score in (best, worst)),
            "max_random": 0.4 if score == best else 0.1,
        }[keys["kind"]]
    return weights if weights.any() else trains.astype(float)


def sampled_rows(weights: Array, seed: int) -> Sequence[int]:
    generator = torch.Generator().manual_seed(seed)
    rows: list[int] = torch.multinomial(
        torch.tensor(weights / weights.sum()), len(weights), replacement=True, generator=generator
    ).tolist()
    return rows
