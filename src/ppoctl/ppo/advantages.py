"""Generalised advantage estimation over rows with holes, without a loop over time.

The textbook recursion runs from the last token to the first (Schulman et al. 2016, arXiv:1506.02438, eq. 16):

    delta_t = r_t + gamma V_t+1 - V_t          A_t = delta_t + gamma lam A_t+1          G_t = A_t + V_t

Here the same numbers come from three ideas:

1. Put G into the recursion (the lambda return of Sutton and Barto, 2nd ed., eq. 12.2) and unroll it:

       x_t = (1 - lam) V_t + lam r_t           G_t = r_t + gamma sum_{j > t} (gamma lam)^(j - t - 1) x_j

   One series is summed instead of two, and no values cancel: lam = 1 gives the discounted sum of rewards itself.
2. Pack the counted tokens of a row side by side. A hole (tool output in mid-response) then does not exist.
3. Sum by doubling: what reaches one token ahead, then two, then four (Hillis and Steele 1986).

There is no bootstrap behind the last token: for the recursion it is part of the last reward (`rewards.bootstrapped`).
Whitening is the caller's.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Speed only: so many tokens at a time stay in the cache while their sums double.
CHUNK_TOKENS = 2**18


def gae(
    rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    gamma: float,
    lam: float | Float[Tensor, " B"],
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Advantages and returns, both exactly 0 under the mask and without a gradient.

        A_t = sum_{l >= 0} (gamma lam)^l (r_t+l + gamma V_t+l+1 - V_t+l)        G_t = A_t + V_t

    with t counting the counted tokens of a row: masked positions cost neither gamma nor lam, and a reward there
    is not seen. lam is one number for all rows or one for each. Source: Schulman et al. 2016, eq. 16; carry over
    holes as in NeMo-RL and verl.

    Raises ValueError when gamma or a lam lies outside 0 to 1.
    """
    lams = torch.as_tensor(lam, dtype=torch.float64, device=rewards.device).expand(rewards.shape[0])
    _require_share("gamma", torch.tensor(gamma))
    _require_share("lam", lams)
    rows_at_once = max(1, CHUNK_TOKENS // max(1, rewards.shape[1]))
    chunks = (torch.split(x, rows_at_once) for x in (rewards, values, mask, lams[:, None]))
    with torch.no_grad():
        parts = [_gae_of_chunk(r, v, m, of_row, gamma) for r, v, m, of_row in zip(*chunks, strict=True)]
    advantages, returns = (torch.cat(part) for part in zip(*parts, strict=True))
    return advantages, returns


def monte_carlo(rewards: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, gamma: float) -> Float[Tensor, "B R"]:
    """The discounted sum of the rewards from each counted token on, and 0 under the mask; no critic is asked.

        G_t = sum_{l >= 0} gamma^l r_t+l

    Source: Williams 1992 (REINFORCE); with gamma 1 and no KL in the reward NeMo-RL's `raw_reward`.
    Raises ValueError when gamma lies outside 0 to 1.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[1]


def length_adaptive_lambda(mask: Bool[Tensor, "B R"], *, alpha: float) -> Float[Tensor, " B"]:
    """GAE's lambda of each row from its number n of counted tokens, in float64.

        1 - 1 / max(1, alpha n)

    So 1 / (1 - lambda), over which rewards are spread, is alpha times the length; up to 1 / alpha tokens it is 0.
    Source: VAPO, arXiv:2504.05118, eq. 7, with NeMo-RL's bound.
    """
    return 1.0 - 1.0 / (alpha * mask.sum(dim=1, dtype=torch.float64)).clamp(min=1.0)


def _gae_of_chunk(rewards: Tensor, values: Tensor, mask: Tensor, lam: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    returns = rewards + gamma * _discounted_future(rewards, values, mask, gamma, lam)
    return torch.where(mask, returns - values, 0), torch.where(mask, returns, 0)


def _discounted_future(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """sum_{j > t} (gamma lam)^(j - t - 1) x_j at counted positions, and junk elsewhere; lam is `[rows, 1]`."""
    # The k-th counted token of a row goes to column k = 1, 2, ...; everything masked is thrown onto column 0. The
    # last column stays empty: the future of the last token.
    column = mask.cumsum(dim=1).masked_fill_(~mask, 0)
    packed = rewards.new_zeros(mask.shape[0], mask.shape[1] + 2)
    packed.scatter_(1, column, torch.lerp(values, rewards, lam.to(rewards.dtype)))
    return _suffix_sums(packed, decay=gamma * lam)[:, 1:].gather(1, column)


def _suffix_sums(x: Float[Tensor, "m C"], *, decay: Float[Tensor, "m 1"]) -> Float[Tensor, "m C"]:
    """s_t = sum_{j >= t} decay^(j - t) x_j along each row, with a decay per row (float64: its powers stay exact)."""
    reach = 1
    while reach < x.shape[1]:
        # Each sum reaches `reach` columns ahead; the one that begins where it ends doubles that.
        x = torch.cat([torch.addcmul(x[:, :-reach], x[:, reach:], decay.to(x.dtype)), x[:, -reach:]], dim=1)
        reach, decay = 2 * reach, decay.square()
    return x


def _require_share(name: str, numbers: Tensor) -> None:
    """Raise ValueError naming the first that does not lie between 0 and 1."""
    for number in numbers[~((numbers >= 0) & (numbers <= 1))].flatten()[:1].tolist():
        raise ValueError(f"{name} is {number}: it must lie between 0 and 1")
