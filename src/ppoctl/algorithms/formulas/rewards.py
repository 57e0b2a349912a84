"""Reward shaping, and the position of a sequence's reward on the response grid.

The caller adds penalties per token (KL in the reward).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl.algorithms.formulas.masking import masked_mean, whiten


def terminal_rewards(scores: Float[Tensor, " B"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Return token rewards: each row's score at its last unmasked token, 0 elsewhere. A row without an unmasked token
    has only zeros.

        r_t = score * 1[t = last unmasked position]

    The position is the last unmasked token instead of the last token: GAE skips masked-out tokens, so it would ignore
    a reward on a masked-out token. Source: the token rewards of NeMo-RL and verl.
    """
    num_so_far = mask.cumsum(dim=1)
    last = mask & (num_so_far == num_so_far[:, -1:])
    return torch.where(last, scores.unsqueeze(1), 0)


def scaled(
    scores: Float[Tensor, "*scores"], *, source: tuple[float, float], target: tuple[float, float]
) -> Float[Tensor, "*scores"]:
    """Return the scores clamped to `source`, then mapped linearly to `target`; both are (low, high).

        target_low + (clamp(score) - source_low) / (source_high - source_low) * (target_high - target_low)

    Both ends are mapped exactly. Source: the reward scaling of NeMo-RL. The ends of `source` must differ.
    """
    (low, high), (to_low, to_high) = source, target
    # Compute in float64, so that both ends are mapped exactly.
    fraction = (scores.to(torch.float64).clamp(low, high) - low) / (high - low)
    return (to_low + fraction * (to_high - to_low)).to(scores.dtype)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers."""

    count: float
    mean: float
    m2: float

    @property
    def std(self) -> float:
        """Unbiased standard deviation, sqrt(m2 / (count - 1)); 0 for fewer than two numbers."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0


def moments_of(numbers: Float[Tensor, " n"]) -> Moments:
    """Return the moments of these numbers, computed in float64; all 0 for no numbers."""
    if len(numbers) == 0:
        return Moments(0.0, 0.0, 0.0)
    exact = numbers.to(torch.float64)
    mean = exact.mean()
    return Moments(float(len(numbers)), float(mean), float((exact - mean).square().sum()))


def merged(first: Moments, second: Moments) -> Moments:
    """Return the moments of both sets of numbers together, as if computed at once.

        n = n1 + n2    d = mean2 - mean1    mean = mean1 + d n2 / n    m2 = m2_1 + m2_2 + d^2 n1 n2 / n

    Source: Chan, Golub and LeVeque 1979; the running moments of trlX.
    """
    count = first.count + second.count
    if count == 0:
        return first
    gap = second.mean - first.mean
    mean = first.mean + gap * second.count / count
    return Moments(count, mean, first.m2 + second.m2 + gap * gap * first.count * second.count / count)


def overlong_penalty(
    lengths: Int[Tensor, " B"], *, max_tokens: int, buffer_tokens: int, penalty: float, floor: bool
) -> Float[Tensor, " B"]:
    """Return the reward change of each response by its length, at most 0.

        min(0, (max_tokens - buffer_tokens - length) / buffer_tokens) penalty        floor: at least -penalty

    It is 0 up to `max_tokens` - `buffer_tokens`, decreases linearly to -`penalty` at `max_tokens`, and with `floor`
    stays at -`penalty` for longer responses. Source: DAPO, arXiv:2503.14476, eq. 13 (with the floor); NeMo-RL has no
    floor.
    """
    over = (lengths - (max_tokens - buffer_tokens)).to(torch.float64) / buffer_tokens
    return (-penalty * over.clamp(0.0, 1.0 if floor else math.inf)).to(torch.float32)


def length_penalty(lengths: Int[Tensor, " B"], *, per_token: float, free_tokens: int) -> Float[Tensor, " B"]:
    """Return the reward change of each response by its length: -`per_token` for each token beyond `free_tokens`."""
    return (-per_token * (lengths - free_tokens).clamp(min=0).to(torch.float64)).to(torch.float32)


def with_unit_variance(rewards: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Return token rewards scaled to unit variance over all unmasked tokens; their mean does not change.

        mean + (r - mean) / sqrt(variance + 1e-8)

    Equal rewards keep their value. Source: whitening without a shift of the mean, as in lm-human-preferences and TRL
    (`whiten_rewards`). Raises ValueError if all positions are masked out.
    """
    return torch.where(mask, whiten(rewards, mask) + masked_mean(rewards, mask), 0)


def bootstrapped(
    rewards: Float[Tensor, "B R"], bootstrap_values: Float[Tensor, " B"], mask: Bool[Tensor, "B R"], *, gamma: float
) -> Float[Tensor, "B R"]:
    """Return token rewards that include the bootstrap value: the value of the state after a row's last token; 0 if
    the episode has ended.

        r_T + gamma V_T+1, the last return of a truncated episode

    Source: Pardo et al. 2018, arXiv:1712.00378, eq. 6.
    """
    return rewards + terminal_rewards(gamma * bootstrap_values, mask)
