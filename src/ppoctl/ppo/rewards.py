"""The arithmetic of rewards, and where a sequence's reward lands on the response grid.

Penalties per token (KL in the reward) are added by the caller.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def terminal_rewards(scores: Float[Tensor, " B"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Token rewards: each row's score on its last counted token, 0 elsewhere; a row without one gets zeros.

        r_t = score * 1[t = last counted position]

    The last counted token, not the last token: a reward on a masked token would be skipped by GAE and lost.
    Source: the token rewards of NeMo-RL and verl.
    """
    num_so_far = mask.cumsum(dim=1)
    last = mask & (num_so_far == num_so_far[:, -1:])
    return torch.where(last, scores.unsqueeze(1), 0)


def scaled(
    scores: Float[Tensor, "*scores"], *, source: tuple[float, float], target: tuple[float, float]
) -> Float[Tensor, "*scores"]:
    """Scores clamped to `source`, then mapped linearly to `target`; both are (low, high), and both ends land exactly.

        target_low + (clamp(score) - source_low) / (source_high - source_low) * (target_high - target_low)

    Source: the reward scaling of NeMo-RL. `source` may not be empty.
    """
    (low, high), (to_low, to_high) = source, target
    # In float64, so that both ends land exactly.
    share = (scores.to(torch.float64).clamp(low, high) - low) / (high - low)
    return (to_low + share * (to_high - to_low)).to(scores.dtype)
