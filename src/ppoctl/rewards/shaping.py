"""The arithmetic between scores and the rewards of training, which every reward has: one table of the recipe for each
step. `steps_of` has their order; `stages.shaping` takes them.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ppoctl.recipe_table import RESULTS, Array, AtLeastOne, Fraction, NotNegative, Positive, Table


class RewardScale(Table):
    """Affine map of scores: clamp to `from`, then map linearly to `to`.

    Formula: to_low + (clamp(score, from_low, from_high) - from_low) / (from_high - from_low) (to_high - to_low)
    Source: NeMo-RL (`reward_scaling`)
    Default of: verl (off); NeMo-RL has 0 .. 1 to -1 .. 1
    Figures: reward/clamped_frac, reward/shaped_mean
    """

    from_: Annotated[tuple[float, float], RESULTS, Array] = Field(alias="from")
    """Lowest and highest score."""
    to: Annotated[tuple[float, float], RESULTS, Array]
    """Rewards that the lowest and highest score become."""


class RewardClip(Table):
    """Bounds of rewards: what lies outside becomes the bound.

    Formula: clamp(reward, low, high)
    Source: trlX (`cliprange_reward`)
    Default of: verl, NeMo-RL, TRL (off); trlX and OpenRLHF have -10 .. 10, trlX's NeMo path after the moments
    Figures: reward/clipped_frac
    """

    low: Annotated[float, RESULTS]
    """Lowest reward."""
    high: Annotated[float, RESULTS]
    """Highest reward."""
    place: Annotated[Literal["before_moments", "after_moments"], RESULTS] = "before_moments"
    """Whether rewards are clipped before or after they are divided by `moments`."""


class NoMoments(Table):
    """No division."""

    kind: Annotated[Literal["none"], RESULTS]
    """No division."""


class RunningMoments(Table):
    """Rewards divided by the standard deviation of all rewards of the run so far, this step's included. As long as
    all are equal they stay as they are.

    Formula: reward / std of all rewards so far; with center (reward - mean) / std
    Source: Engstrom et al. 2020 (arXiv:2005.12729); merged as Chan, Golub and LeVeque 1979
    Default of: nobody; trlX has it as `running`
    Figures: reward/moments_mean, reward/moments_std
    """

    kind: Annotated[Literal["running"], RESULTS]
    """Moments of all steps so far, carried from step to step and saved with the states."""
    center: Annotated[bool, RESULTS] = False
    """Subtract the mean before dividing."""


class ReferenceMoments(Table):
    """Rewards divided by a standard deviation that stays the same (trlX's `scale_reward = "ref"`).

    Formula: reward / std; with center (reward - mean of the first step) / std
    Source: trlX (`ref`)
    Default of: nobody; OpenRLHF divides by what its reward model was stored with, if asked
    Figures: reward/moments_mean, reward/moments_std
    """

    kind: Annotated[Literal["reference"], RESULTS]
    """Moments of one step, or those that are written here."""
    std: Annotated[float | None, RESULTS, Positive] = None
    """Standard deviation that rewards are divided by; absent: that of the first step whose rewards differ."""
    center: Annotated[bool, RESULTS] = False
    """Subtract the mean of the first step whose rewards differ before dividing."""


MomentsTable = Annotated[NoMoments | RunningMoments | ReferenceMoments, Field(discriminator="kind")]


class OverlongPenalty(Table):
    """Soft penalty of responses that come near the limit: 0 up to max_tokens - buffer_tokens, then linearly down to
    -penalty at max_tokens.

    Formula: reward + clamp((max_tokens - buffer_tokens - length) / buffer_tokens, -1, 0) penalty; where floor is
        false without the bound of -1
    Source: DAPO (arXiv:2503.14476), eq. 13
    Default of: verl (off); NeMo-RL has 2,048 tokens before 14,336, and no floor
    Figures: reward/overlong_mean
    """

    buffer_tokens: Annotated[int, RESULTS, AtLeastOne]
    """Tokens before `max_tokens` over which the penalty grows."""
    penalty: Annotated[float, RESULTS, Positive] = 1.0
    """What a response of `max_tokens` loses."""
    max_tokens: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Length at which the whole penalty is due; absent: `rollout.max_new_tokens`."""
    floor: Annotated[bool, RESULTS] = True
    """Whether no longer response loses more than `penalty` (DAPO); false: the line goes on (NeMo-RL)."""


class LengthPenalty(Table):
    """Penalty of each token of a response.

    Formula: reward - per_token max(0, length - free_tokens)
    Source: none; the plainest there is
    Default of: all systems (off)
    Figures: reward/length_mean
    """

    per_token: Annotated[float, RESULTS, Positive]
    """What a response loses for each token beyond `free_tokens`."""
    free_tokens: Annotated[int, RESULTS, NotNegative] = 0
    """Tokens that cost nothing."""


class RewardShaping(Table):
    """Steps from a score to the reward of training. Scores are stored as they are: a change of a step scores nothing
    again."""

    scale: RewardScale | None = None
    """Map from scores to the rewards of training; absent: scores are the rewards."""
    clip: RewardClip | None = None
    """Bounds of rewards; absent: none."""
    moments: MomentsTable = NoMoments(kind="none")
    """Division by a standard deviation of rewards."""
    unfinished_factor: Annotated[float, RESULTS, Fraction] = 1.0
    """Factor of the reward of a truncated response (NeMo-RL's and OpenRLHF's `stop_properly_penalty_coef`); 1: none.
    It makes a reward below 0 less bad: it is meant for rewards from 0 up.

    Formula: reward of a truncated response = unfinished_factor x reward
    Source: NeMo-RL and OpenRLHF (`stop_properly_penalty_coef`)
    Default of: all systems (off)
    Figures: reward/unfinished_mean
    """
    overlong: OverlongPenalty | None = None
    """Penalty of responses near the limit; absent: none."""
    length_penalty: LengthPenalty | None = None
    """Penalty of long responses; absent: none."""


ShapingTable = RewardScale | RewardClip | RunningMoments | ReferenceMoments | float | OverlongPenalty | LengthPenalty
"""One step, as its table has it; the factor of truncated responses is a number."""


def steps_of(table: RewardShaping) -> Iterator[ShapingTable]:
    """The steps that the table asks for, in the one order in which they are taken."""
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
