"""What training sees of what a scorer gave: the steps of `[reward]`, one after another; part of 50-advantages.

Every step is a small class with the numbers of its table. Scores themselves are stored as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch.records import TRUNCATED, Carry, Rewards, Rollouts
from ppoctl.ppo.masking import masked_mean
from ppoctl.ppo.rewards import (
    Moments,
    length_penalty,
    merged,
    moments_of,
    overlong_penalty,
    scaled,
    terminal_rewards,
)


@dataclass(frozen=True)
class ShapedRewards:
    """Rewards on their way from scores to training."""

    rewards: Float[Tensor, " B"] | Float[Tensor, "B R"]
    """One for each response, or for each token; anything where there is no score."""
    rollouts: Rollouts
    valid: Bool[Tensor, " B"]
    """Responses that have a score."""
    carry: Carry
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def mask(self) -> Bool[Tensor, "B R"]:
        """Tokens that the actor chose in responses that have a score."""
        return self.rollouts.mask & self.valid[:, None]

    @property
    def truncated(self) -> Bool[Tensor, " B"]:
        """Responses that the length limit ended."""
        return self.rollouts.finish == TRUNCATED

    @property
    def per_token(self) -> Float[Tensor, "B R"]:
        """Rewards of tokens; one for a whole response stands at its last counted token."""
        if self.rewards.ndim == 1:
            return terminal_rewards(self.rewards, self.mask)
        return self.rewards.where(self.mask, 0.0)

    @property
    def per_response(self) -> Float[Tensor, " B"]:
        """What each response earned; 0 where there is no score."""
        if self.rewards.ndim == 1:
            return self.rewards.where(self.valid, 0.0)
        return self.per_token.sum(dim=1)

    def plus(self, amounts: Float[Tensor, " B"]) -> "ShapedRewards":
        """Each response with so much more, at its last counted token where rewards are of tokens."""
        more = amounts if self.rewards.ndim == 1 else terminal_rewards(amounts, self.mask)
        return replace(self, rewards=self.rewards + more.to(self.rewards.dtype))

    def share(self, hit: Bool[Tensor, " B"] | Bool[Tensor, "B R"]) -> float:
        """Share of the rewards that count, of responses or of tokens, that `hit` names."""
        counted = self.valid if self.rewards.ndim == 1 else self.mask
        return float(masked_mean(hit.to(torch.float32), counted))

    def mean(self, amounts: Float[Tensor, " B"]) -> float:
        """Mean over the responses that have a score."""
        return float(amounts[self.valid].mean())

    def with_metrics(self, **changes: Any) -> "ShapedRewards":
        """The next of it, `metrics` added to those of the steps before."""
        return replace(self, **{**changes, "metrics": self.metrics | changes["metrics"]})


ShapingStep = Callable[[ShapedRewards], ShapedRewards]
"""One step of the arithmetic."""


def apply_shaping(rewards: Rewards, rollouts: Rollouts, carry: Carry, steps: Sequence[ShapingStep]) -> ShapedRewards:
    """Scores after all steps, with the figure of each step and the mean of what came out."""
    scores = rewards.scores if rewards.token_scores is None else rewards.token_scores
    earned = ShapedRewards(scores, rollouts, rewards.valid, carry)
    for step in steps:
        earned = step(earned)
    return earned.with_metrics(metrics={metric_registry.REWARD_SHAPED_MEAN.name: earned.mean(earned.per_response)})


@dataclass(frozen=True)
class ApplyScale:
    """Clamps to `source`, then maps linearly to `target`."""

    source: tuple[float, float]
    target: tuple[float, float]

    def __call__(self, earned: ShapedRewards) -> ShapedRewards:
        rewards = scaled(earned.rewards, source=self.source, target=self.target)
        outside = (earned.rewards < self.source[0]) | (earned.rewards > self.source[1])
        return earned.with_metrics(
            rewards=rewards, metrics={metric_registry.REWARD_CLAMPED_FRAC.name: earned.share(outside)}
        )


@dataclass(frozen=True)
class ApplyClip:
    """Bounds every reward."""

    low: float
    high: float

    def __call__(self, earned: ShapedRewards) -> ShapedRewards:
        clipped = earned.rewards.clamp(self.low, self.high)
        hit = earned.share(clipped != earned.rewards)
        return earned.with_metrics(rewards=clipped, metrics={metric_registry.REWARD_CLIPPED_FRAC.name: hit})


@dataclass(frozen=True)
class NormalizeByRunningStd:
    """Divides by the standard deviation of what all responses of the run have earned so far."""

    center: bool

    def __call__(self, earned: ShapedRewards) -> ShapedRewards:
        carry = earned.carry
        before = Moments(carry.reward_count, carry.reward_mean, carry.reward_m2)
        now = merged(before, moments_of(earned.per_response[earned.valid]))
        carry = replace(carry, reward_count=now.count, reward_mean=now.mean, reward_m2=now.m2)
        return _divided(replace(earned, carry=carry), now.mean, now.std, center=self.center)


@dataclass(frozen=True)
class NormalizeByReferenceStd:
    """Divides by `std`, or by the standard deviation of the first step whose rewards differ."""

    std: float | None
    center: bool

    def __call__(self, earned: ShapedRewards) -> ShapedRewards:
        carry = earned.carry
        if carry.reward_reference_std == 0:
            now = moments_of(earned.per_response[earned.valid])
            first = now if now.std > 0 else Moments(0.0, 0.0, 0.0)
            carry = replace(carry, reward_reference_mean=first.mean, reward_reference_std=first.std)
        std = self.std or carry.reward_reference_std
        if self.center and carry.reward_reference_std == 0:
            std = 0.0  # whose mean to take away is not known yet
        return _divided(replace(earned, carry=carry), carry.reward_reference_mean, std, center=self.center)


def _divided(earned: ShapedRewards, mean: float, std: float, *, center: bool) -> ShapedRewards:
    """Rewards divided by `std`; as they are where that is 0, as all have been equal so far."""
    figures = {metric_registry.REWARD_MOMENTS_MEAN.name: mean, metric_registry.REWARD_MOMENTS_STD.name: std}
    if std == 0:
        return earned.with_metrics(metrics=figures)
    if center:
        earned = earned.plus(torch.full_like(earned.per_response, -mean))
    return earned.with_metrics(rewards=earned.rewards / std, metrics=figures)


@dataclass(frozen=True)
class ScaleTruncated:
    """Multiplies the rewards of truncated responses."""

    factor: float

    def __call__(self, earned: ShapedRewards) -> ShapedRewards:
        cut = earned.truncated if earned.rewards.ndim == 1 else earned.truncated[:, None]
        after = replace(earned, rewards=torch.where(cut, self.factor * earned.rewards, earned.rewards))
        change = earned.mean(after.per_response - earned.per_response)
        return after.with_metrics(metrics={metric_registry.REWARD_UNFINISHED_MEAN.name: change})


@dataclass(frozen=True)
class PenalizeOverlong:
    """Takes from responses that come near a length."""

    max_tokens: int
    buffer_tokens: int
    penalty: float
    floor: bool

    def __call__(self, earned: ShapedRewards) -> ShapedRewards:
        amounts = overlong_penalty(
            earned.rollouts.lengths,
            max_tokens=self.max_tokens,
            buffer_tokens=self.buffer_tokens,
            penalty=self.penalty,
            floor=self.floor,
        )
        return earned.plus(amounts).with_metrics(
            metrics={metric_registry.REWARD_OVERLONG_MEAN.name: earned.mean(amounts)}
        )


@dataclass(frozen=True)
class PenalizeLength:
    """Takes from responses for each of their tokens."""

    per_token: float
    free_tokens: int

    def __call__(self, earned: ShapedRewards) -> ShapedRewards:
        lengths = earned.rollouts.lengths
        amounts = length_penalty(lengths, per_token=self.per_token, free_tokens=self.free_tokens)
        return earned.plus(amounts).with_metrics(
            metrics={metric_registry.REWARD_LENGTH_MEAN.name: earned.mean(amounts)}
        )
