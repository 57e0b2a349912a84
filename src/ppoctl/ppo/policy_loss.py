"""The clipped policy loss of PPO.

Entropy bonus and KL penalty are terms of their own.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.ppo.kl import MAX_LOG_RATIO


@dataclass(frozen=True)
class PolicyClip:
    """How far a token's ratio may move before its gradient stops.

    The ratio is clipped to 1 - low .. 1 + high (PPO: equal; DAPO, arXiv:2503.14476: high above low). dual bounds the
    loss of a token with a negative advantage at dual times |A| (Ye et al. 2020, arXiv:1912.09729); None: no bound.
    Raises ValueError when low is outside 0 to 1, high is negative or dual is not above 1.
    """

    low: float
    high: float
    dual: float | None

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= 1.0:
            raise ValueError(f"low is {self.low}: it must lie between 0 and 1")
        if not self.high >= 0.0:
            raise ValueError(f"high is {self.high}: it must not be negative")
        if self.dual is not None and not self.dual > 1.0:
            raise ValueError(f"dual is {self.dual}: it must be above 1, or None for no bound")


def clipped_policy_losses(
    logprobs: Float[Tensor, "B R"],
    old_logprobs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    clip: PolicyClip,
) -> Float[Tensor, "B R"]:
    """The loss of each token, to be minimised; exactly 0 under the mask.

        ratio = exp(logprobs - old)          l = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
        where A < 0 and dual is set: l = min(l, -A dual)

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; dual clip as in verl and NeMo-RL. Only logprobs carry
    a gradient: advantages and old log-probs are constants of the update. The loss is linear in the size of A, so
    weights of a rollout correction are multiplied into the advantages.
    """
    ratio = token_ratios(logprobs, old_logprobs, mask)
    advantages = torch.where(mask, advantages, 0).detach()
    clipped_ratio = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    # The larger loss of the two is the pessimist's: the clip takes the reward for moving on, never the cost.
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if clip.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)
    return torch.where(mask, loss, 0)


def token_ratios(
    logprobs: Float[Tensor, "B R"], old_logprobs: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
) -> Float[Tensor, "B R"]:
    """exp(logprobs - old) with the difference held within +-20, and 1 under the mask; old carries no gradient."""
    # Blanked before exp: a where behind it would stop NaN in the value but not in the gradient (0 times NaN).
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
