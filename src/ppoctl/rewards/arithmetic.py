"""The arithmetic between scores and the rewards of training, which every reward has: one table of the recipe for each
step. The steps are taken in the order in which they stand here; `stages.shaping` takes them.
"""

from typing import Annotated

from pydantic import Field

from ppoctl.table import RESULTS, Array, Table


class RewardScale(Table):
    """Affine map of scores: clamp to `from`, then map linearly to `to`."""

    from_: Annotated[tuple[float, float], RESULTS, Array] = Field(alias="from")
    """Lowest and highest score."""
    to: Annotated[tuple[float, float], RESULTS, Array]
    """Rewards that the lowest and highest score become."""


class RewardArithmetic(Table):
    """Steps from a score to the reward of training. Scores are stored as they are: a change of a step scores nothing
    again."""

    scale: RewardScale | None = None
    """Map from scores to the rewards of training; absent: scores are the rewards."""
