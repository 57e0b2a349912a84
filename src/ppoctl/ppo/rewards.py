"""Where a sequence's score lands on the response grid.

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
