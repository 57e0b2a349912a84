"""What training sees of a score: clamp, then a linear map. Scores themselves are stored as they are."""

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.rewards.table import RewardScale


def shape(scores: Float[Tensor, " B"], scale: RewardScale | None) -> Float[Tensor, " B"]:
    """to_low + (clamp(score) - from_low) / (from_high - from_low) * (to_high - to_low); the scores where `scale` is
    None. That `from` is no empty range is a rule of the recipe."""
    if scale is None:
        return scores
    (low, high), (to_low, to_high) = scale.from_, scale.to
    # In float64, so that both ends land exactly on `to`.
    share = (scores.to(torch.float64).clamp(low, high) - low) / (high - low)
    return (to_low + share * (to_high - to_low)).to(scores.dtype)
