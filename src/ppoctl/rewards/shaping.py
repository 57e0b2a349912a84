"""What training sees of a score: clamp, then a linear map. Scores themselves are stored as they are."""

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.errors import RecipeError
from ppoctl.recipe.schema import RewardScale


def require_range(scale: RewardScale) -> None:
    """Raises RecipeError where `from` is not a range, lowest first."""
    low, high = scale.from_
    if not low < high:
        raise RecipeError(
            f"`reward.scale.from` is `[{low:g}, {high:g}]`, and its first number must be below its second",
            hint="name the lowest and the highest score, for instance `from = [0, 1]`; `to` may run downwards",
        )


def shape(scores: Float[Tensor, " B"], scale: RewardScale | None) -> Float[Tensor, " B"]:
    """to_low + (clamp(score) - from_low) / (from_high - from_low) * (to_high - to_low); the scores where `scale` is
    None. Raises RecipeError on an empty range."""
    if scale is None:
        return scores
    require_range(scale)
    (low, high), (to_low, to_high) = scale.from_, scale.to
    # In float64, so that both ends land exactly on `to`.
    share = (scores.to(torch.float64).clamp(low, high) - low) / (high - low)
    return (to_low + share * (to_high - to_low)).to(scores.dtype)
