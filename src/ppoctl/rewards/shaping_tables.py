"""Reward shaping: the steps between scores and the rewards of training, one recipe table for each. Every kind of
reward has these tables. `steps_of` defines their order, and `stages.shaping` applies them.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ppoctl.core.recipe_table import RESULTS, Array, AtLeastOne, Fraction, NotNegative, Positive, Table


class RewardScale(Table):
    """Affine map of scores: clamp to `from`, then map linearly to `to`.

    Formula: to_low + (clamp(score, from_low, from_high) - from_low) / (from_high - from_low) (to_high - to_low)
    Source: NeMo-RL (`reward_scaling`)
    Default of: verl (off); NeMo-RL maps 0 .. 1 to -1 .. 1
    Figures: reward/clamped_frac, reward/shaped_mean
    """

    from_: Annotated[tuple[float, float], RESULTS, Array] = Field(alias="from")
    """Lowest and highest score."""
    to: Annotated[tuple[float, float], RESULTS, Array]
    """Rewards for the lowest and the highest score."""


class RewardClip(Table):
    """Bounds to which rewards are clamped.

    Formula: clamp(reward, low, high)
    Source: trlX (`cliprange_reward`)
    Default of: verl, NeMo-RL, TRL (off); trlX and OpenRLHF clip to -10 .. 10, trlX's NeMo path after the moments
    Figures: reward/clipped_frac
    """

    low: Annotated[float, RESULTS]
    """Lowest reward."""
    high: Annotated[float, RESULTS]
    """Highest reward."""
    place: Annotated[Literal["before_moments", "after_moments"], RESULTS] = "before_moments"
    """Whether rewards are clipped before or after they are divided by a standard deviation (`moments`)."""


class NoMoments(Table):
    """No division."""

    kind: Annotated[Literal["none"], RESULTS]
    """No division."""


class RunningMoments(Table):
    """Rewards divided by the standard deviation of all rewards of the run so far, including this step. While all
    rewards are equal, they are not changed.

    Formula: reward / std of all rewards so far; with center (reward - mean) / std
    Source: Engstrom et al. 2020 (arXiv:2005.12729); merged as Chan, Golub and LeVeque 1979
    Default of: none; trlX has it as `running`
    Figures: reward/moments_mean, reward/moments_std
    """

    kind: Annotated[Literal["running"], RESULTS]
    """Moments of all steps so far, carried from step to step and saved with the states of the roles."""
    center: Annotated[bool, RESULTS] = False
    """Subtract the mean before dividing."""


class ReferenceMoments(Table):
    """Rewards divided by a fixed standard deviation (trlX's `scale_reward = "ref"`).

    Formula: reward / std; with center (reward - mean of the first step) / std
    Source: trlX (`ref`)
    Default of: none; OpenRLHF can divide by the standard deviation stored with its reward model
    Figures: reward/moments_mean, reward/moments_std
    """

    kind: Annotated[Literal["reference"], RESULTS]
    """Moments of the first step in which rewards differ from each other, or the configured `std`."""
    std: Annotated[float | None, RESULTS, Positive] = None
    """Divisor of the rewards; absent: the standard deviation of the first step in which rewards differ from each
    other."""
    center: Annotated[bool, RESULTS] = False
    """Before dividing, subtract the mean of the first step in which rewards differ from each other."""


MomentsTable = Annotated[NoMoments | RunningMoments | ReferenceMoments, Field(discriminator="kind")]


class OverlongPenalty(Table):
    """Soft penalty of responses near the length limit: 0 up to max_tokens - buffer_tokens, then linearly down to
    -penalty at max_tokens.

    Formula: reward + clamp((max_tokens - buffer_tokens - length) / buffer_tokens, -1, 0) penalty; if floor is false,
        without the bound of -1
    Source: DAPO (arXiv:2503.14476), eq. 13
    Default of: verl (off); NeMo-RL has 2,048 tokens before 14,336, and no floor
    Figures: reward/overlong_mean
    """

    buffer_tokens: Annotated[int, RESULTS, AtLeastOne]
    """Tokens before `max_tokens` over which the penalty grows."""
    penalty: Annotated[float, RESULTS, Positive] = 1.0
    """Penalty of a response of `max_tokens`, subtracted from its reward."""
    max_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Length with the full penalty; absent: `rollout.max_new_tokens`."""
    floor: Annotated[bool, RESULTS] = True
    """Whether longer responses lose at most `penalty` (DAPO). False: the penalty keeps growing linearly (NeMo-RL)."""


class LengthPenalty(Table):
    """Penalty for each token of a response.

    Formula: reward - per_token max(0, length - free_tokens)
    Source: none; the simplest length penalty
    Default of: all systems (off)
    Figures: reward/length_mean
    """

    per_token: Annotated[float, RESULTS, Positive]
    """Penalty for each token beyond `free_tokens`, subtracted from the reward."""
    free_tokens: Annotated[int, RESULTS, NotNegative] = 0
    """Number of tokens without a penalty."""


class RewardShaping(Table):
    """Steps from a score to the reward of training. The unshaped scores are stored, so a change of these settings
    does not require scoring again."""

    scale: RewardScale | None = None
    """Map from scores to the rewards of training; absent: scores are the rewards."""
    clip: RewardClip | None = None
    """Bounds of rewards; absent: none."""
    moments: MomentsTable = NoMoments(kind="none")
    """Division by a standard deviation of rewards."""
    unfinished_factor: Annotated[float, RESULTS, Fraction] = 1.0
    """Factor of the reward of a truncated response (NeMo-RL's and OpenRLHF's `stop_properly_penalty_coef`); 1: off.
    Use it only with rewards of at least 0, because a factor below 1 makes a negative reward less negative.

    Formula: reward of a truncated response = unfinished_factor x reward
    Source: NeMo-RL and OpenRLHF (`stop_properly_penalty_coef`)
    Default of: all systems (off)
    Figures: reward/unfinished_mean
    """
    overlong: OverlongPenalty | None = None
    """Penalty of responses near the length limit; absent: none."""
    length_penalty: LengthPenalty | None = None
    """Penalty of long responses; absent: none."""


ShapingTable = RewardScale | RewardClip | RunningMoments | ReferenceMoments | float | OverlongPenalty | LengthPenalty
"""Table of one shaping step; the factor of truncated responses is a number."""


def steps_of(table: RewardShaping) -> Iterator[ShapingTable]:
    """Yield the configured steps in the order in which they are applied."""
    place = None if table.clip is None else table.clip.place
    order = (
        table.scale,
        table.clip if place == "before_moments" else None,
        None if isinstance(table.moments, NoMoments) else table.moments,
        table.clip if place == "after_moments" else None,
        None if table.unfinished_factor == 1 else table.unfinished_factor,
        table.overlong,
        table.length_penalty,
    )
    return (step for step in order if step is not None)
