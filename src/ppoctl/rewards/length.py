"""Length: the reward is 1 within bounds, and falls linearly to 0 outside. Scorer processes import this module, so it
imports only the standard library and recipe tables.

    at_most = 400                                   1 up to 400, else 0
    at_most = 400, fall = 100                       1 up to 400, 0.5 at 450, 0 from 500 on
    at_least = 300, at_most = 300, fall = 300       closer to 300 is better
    at_least = 1000, fall = 1000                    longer is better, up to 1,000

To penalize length in addition to another reward, use `reward.length_penalty` or `reward.overlong`. This kind is for
runs in which the length is the task, and for components of a sum.
"""

from typing import Annotated, Literal

from pydantic import model_validator

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.recipe_table import RESULTS, AtLeastOne, NotNegative
from ppoctl.rewards.function import RewardValue, ScorerSpec
from ppoctl.rewards.scorer_table import ProcessScorer


class LengthScorer(ProcessScorer):
    """Reward 1 for a response whose length is within bounds; outside the bounds, the reward falls linearly to 0. This
    kind requires no ground truth.

    Formula: clamp(1 - max(at_least - length, length - at_most, 0) / fall, 0, 1)
    Source: none; a budget (L1, arXiv:2503.04697) with at_least = at_most
    Default of: none
    Figures: reward/score_mean
    """

    kind: Annotated[Literal["length"], RESULTS]
    """Check the length of the response."""
    unit: Annotated[Literal["tokens", "characters", "words"], RESULTS] = "tokens"
    """Unit of the length: generated tokens (an end token included), characters, or words separated by whitespace."""
    at_least: Annotated[int, RESULTS, NotNegative] = 0
    """Shortest length with reward 1."""
    at_most: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Longest length with reward 1; absent: no limit."""
    fall: Annotated[int, RESULTS, NotNegative] = 0
    """Number of units outside the bounds over which the reward falls to 0. If 0, every length outside the bounds has
    reward 0."""

    @model_validator(mode="after")
    def _some_length_is_better_than_another(self) -> "LengthScorer":
        if self.at_most is None and self.at_least == 0:
            raise ValueError("every length has the reward 1: set `at_most` or `at_least`")
        if self.at_most is not None and self.at_least > self.at_most:
            raise ValueError("`at_least` is above `at_most`")
        return self

    @property
    def scores_by(self) -> ScorerSpec:
        options = {"unit": self.unit, "at_least": self.at_least, "at_most": self.at_most, "fall": self.fall}
        return ScorerSpec("ppoctl.rewards.length:score", options)


def score(
    request: ScoreRequest, *, unit: str, at_least: int = 0, at_most: int | None = None, fall: int = 0
) -> RewardValue:
    """Return a score from 0 to 1."""
    length = _length(request, unit)
    outside = max(at_least - length, 0 if at_most is None else length - at_most, 0)
    return RewardValue(max(1.0 - outside / fall, 0.0) if fall else float(outside == 0))


def _length(request: ScoreRequest, unit: str) -> int:
    if unit == "tokens":
        return request.generated_tokens
    return len(request.response) if unit == "characters" else len(request.response.split())
