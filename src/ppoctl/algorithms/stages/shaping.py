"""Reward shaping: the steps of `[reward]` that turn scores into rewards, one after the other; part of 50-advantages.

Each step is a small class with the settings of its table. The record of rewards contains the unshaped scores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ppoctl.algorithms.formulas.masking import masked_mean
from ppoctl.algorithms.formulas.rewards import (
    Moments,
    length_penalty,
    merged,
    moments_of,
    overlong_penalty,
    scaled,
    terminal_rewards,
)
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import TRUNCATED, Carry, Rewards, Rollouts
from ppoctl.rewards.shaping_tables import (
    LengthPenalty,
    OverlongPenalty,
    ReferenceMoments,
    RewardClip,
    RewardScale,
    RewardShaping,
    RunningMoments,
    ShapingTable,
    steps_of,
)


@dataclass(frozen=True)
class ShapedRewards:
    """Rewards between two shaping steps."""

    rewards: Float[Tensor, " B"] | Float[Tensor, "B R"]
    """One reward per response, or one per token; undefined for responses without a score."""
    rollouts: Rollouts
    valid: Bool[Tensor, " B"]
    """Responses that have a score."""
    carry: Carry
    joins_moments: bool = True
    """Whether these rewards join the moments in `carry`. Otherwise they are only divided by these moments."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def mask(self) -> Bool[Tensor, "B R"]:
        """Tokens that the actor sampled, in responses that have a score."""
        return self.rollouts.mask & self.valid[:, None]

    @property
    def truncated(self) -> Bool[Tensor, " B"]:
        """Responses that the length limit truncated."""
        return self.rollouts.finish == TRUNCATED

    @property
    def generated_tokens(self) -> Int[Tensor, " B"]:
        """Number of tokens that the actor generated in each response. Observations of an environment do not count."""
        return self.rollouts.mask.sum(dim=1)

    @property
    def per_token(self) -> Float[Tensor, "B R"]:
        """Reward of each token. The reward of a whole response is at its last unmasked token."""
        if self.rewards.ndim == 1:
            return terminal_rewards(self.rewards, self.mask)
        return self.rewards.where(self.mask, 0.0)

    @property
    def per_response(self) -> Float[Tensor, " B"]:
        """Reward of each response; 0 for a response without a score."""
        if self.rewards.ndim == 1:
            return self.rewards.where(self.valid, 0.0)
        return self.per_token.sum(dim=1)

    def plus(self, amounts: Float[Tensor, " B"]) -> "ShapedRewards":
        """Return the rewards plus an amount per response. For token rewards, the amount is added at the last unmasked
        token."""
        more = amounts if self.rewards.ndim == 1 else terminal_rewards(amounts, self.mask)
        return replace(self, rewards=self.rewards + more.to(self.rewards.dtype))

    def share(self, hit: Bool[Tensor, " B"] | Bool[Tensor, "B R"]) -> float:
        """Return the fraction of valid rewards (of responses or of tokens) for which `hit` is True."""
        valid = self.valid if self.rewards.ndim == 1 else self.mask
        return float(masked_mean(hit.to(torch.float32), valid))

    def mean(self, amounts: Float[Tensor, " B"]) -> float:
        """Return the mean of `amounts` over the responses that have a score."""
        return float(amounts[self.valid].mean())

    def with_metrics(self, **changes: Any) -> "ShapedRewards":
        """Return a copy with these changes; `metrics` are added to those of earlier steps."""
        return replace(self, **{**changes, "metrics": self.metrics | changes["metrics"]})


ShapingStep = Callable[[ShapedRewards], ShapedRewards]
"""One step of reward shaping."""


def apply_shaping(
    rewards: Rewards, rollouts: Rollouts, carry: Carry, steps: Sequence[ShapingStep], *, joins_moments: bool = True
) -> ShapedRewards:
    """Return the scores after all steps, with the metrics of each step and the mean of the result."""
    shaped = ShapedRewards(rewards.scores, rollouts, rewards.valid, carry, joins_moments)
    if (scores := rewards.token_scores) is not None:
        scores, has_none = pad(scores, (0, rollouts.mask.shape[1] - scores.shape[1])), scores.isnan().any(1)[:, None]
        shaped = replace(shaped, rewards=torch.where(has_none, shaped.per_token, scores))
    for step in steps:
        shaped = step(shaped)
    return shaped.with_metrics(metrics={metric_registry.REWARD_SHAPED_MEAN.name: shaped.mean(shaped.per_response)})


@dataclass(frozen=True)
class ApplyScale:
    """Clamps rewards to `source`, then maps them linearly to `target`."""

    source: tuple[float, float]
    target: tuple[float, float]

    def __call__(self, shaped: ShapedRewards) -> ShapedRewards:
        rewards = scaled(shaped.rewards, source=self.source, target=self.target)
        outside = (shaped.rewards < self.source[0]) | (shaped.rewards > self.source[1])
        return shaped.with_metrics(
            rewards=rewards, metrics={metric_registry.REWARD_CLAMPED_FRAC.name: shaped.share(outside)}
        )


@dataclass(frozen=True)
class ApplyClip:
    """Clips every reward."""

    low: float
    high: float

    def __call__(self, shaped: ShapedRewards) -> ShapedRewards:
        clipped = shaped.rewards.clamp(self.low, self.high)
        clipped_frac = shaped.share(clipped != shaped.rewards)
        return shaped.with_metrics(rewards=clipped, metrics={metric_registry.REWARD_CLIPPED_FRAC.name: clipped_frac})


@dataclass(frozen=True)
class NormalizeByRunningStd:
    """Divides rewards by the standard deviation of the rewards of all responses of the run so far."""

    center: bool

    def __call__(self, shaped: ShapedRewards) -> ShapedRewards:
        carry = shaped.carry
        moments = Moments(carry.reward_count, carry.reward_mean, carry.reward_m2)
        if shaped.joins_moments:
            moments = merged(moments, moments_of(shaped.per_response[shaped.valid]))
        carry = replace(carry, reward_count=moments.count, reward_mean=moments.mean, reward_m2=moments.m2)
        return _divided(replace(shaped, carry=carry), moments.mean, moments.std, center=self.center)


@dataclass(frozen=True)
class NormalizeByReferenceStd:
    """Divides rewards by `std`, or by the standard deviation of the first step whose rewards differ."""

    std: float | None
    center: bool

    def __call__(self, shaped: ShapedRewards) -> ShapedRewards:
        carry = shaped.carry
        if carry.reward_reference_std == 0 and shaped.joins_moments:
            moments = moments_of(shaped.per_response[shaped.valid])
            first = moments if moments.std > 0 else Moments(0.0, 0.0, 0.0)
            carry = replace(carry, reward_reference_mean=first.mean, reward_reference_std=first.std)
        std = self.std or carry.reward_reference_std
        if self.center and carry.reward_reference_std == 0:
            std = 0.0  # the mean to subtract is not known yet
        return _divided(replace(shaped, carry=carry), carry.reward_reference_mean, std, center=self.center)


def _divided(shaped: ShapedRewards, mean: float, std: float, *, center: bool) -> ShapedRewards:
    """Return the rewards divided by `std`. If `std` is 0 (all rewards were equal so far), the rewards are
    unchanged."""
    metrics = {metric_registry.REWARD_MOMENTS_MEAN.name: mean, metric_registry.REWARD_MOMENTS_STD.name: std}
    if std == 0:
        return shaped.with_metrics(metrics=metrics)
    if center:
        shaped = shaped.plus(torch.full_like(shaped.per_response, -mean))
    return shaped.with_metrics(rewards=shaped.rewards / std, metrics=metrics)


@dataclass(frozen=True)
class ScaleTruncated:
    """Multiplies the rewards of truncated responses by a factor."""

    factor: float

    def __call__(self, shaped: ShapedRewards) -> ShapedRewards:
        truncated = shaped.truncated if shaped.rewards.ndim == 1 else shaped.truncated[:, None]
        after = replace(shaped, rewards=torch.where(truncated, self.factor * shaped.rewards, shaped.rewards))
        change = shaped.mean(after.per_response - shaped.per_response)
        return after.with_metrics(metrics={metric_registry.REWARD_UNFINISHED_MEAN.name: change})


@dataclass(frozen=True)
class PenalizeOverlong:
    """Subtracts a penalty from responses whose length approaches a limit."""

    max_tokens: int
    buffer_tokens: int
    penalty: float
    floor: bool

    def __call__(self, shaped: ShapedRewards) -> ShapedRewards:
        amounts = overlong_penalty(
            shaped.generated_tokens,
            max_tokens=self.max_tokens,
            buffer_tokens=self.buffer_tokens,
            penalty=self.penalty,
            floor=self.floor,
        )
        return shaped.plus(amounts).with_metrics(
            metrics={metric_registry.REWARD_OVERLONG_MEAN.name: shaped.mean(amounts)}
        )


@dataclass(frozen=True)
class PenalizeLength:
    """Subtracts a penalty for each token of a response."""

    per_token: float
    free_tokens: int

    def __call__(self, shaped: ShapedRewards) -> ShapedRewards:
        amounts = length_penalty(shaped.generated_tokens, per_token=self.per_token, free_tokens=self.free_tokens)
        return shaped.plus(amounts).with_metrics(
            metrics={metric_registry.REWARD_LENGTH_MEAN.name: shaped.mean(amounts)}
        )


def shaping_steps(table: RewardShaping, *, max_new_tokens: int) -> tuple[ShapingStep, ...]:
    """Return the shaping steps in order, for responses of at most `max_new_tokens` tokens."""
    return tuple(_built(step, max_new_tokens) for step in steps_of(table))


def _built(step: ShapingTable, max_new_tokens: int) -> ShapingStep:
    match step:
        case RewardScale():
            return ApplyScale(step.from_, step.to)
        case RewardClip():
            return ApplyClip(step.low, step.high)
        case RunningMoments():
            return NormalizeByRunningStd(step.center)
        case ReferenceMoments():
            return NormalizeByReferenceStd(step.std, step.center)
        case OverlongPenalty():
            longest = step.max_tokens or max_new_tokens
            return PenalizeOverlong(longest, step.buffer_tokens, step.penalty, step.floor)
        case LengthPenalty():
            return PenalizeLength(step.per_token, step.free_tokens)
        case _:
            return ScaleTruncated(step)
