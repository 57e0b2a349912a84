"""Generalized advantage estimation over rows with masked-out tokens, without a loop over time.

The textbook recursion runs from the last token to the first (Schulman et al. 2016, arXiv:1506.02438, eq. 16):

    delta_t = r_t + gamma V_t+1 - V_t          A_t = delta_t + gamma lam A_t+1          G_t = A_t + V_t

This module computes the same numbers in log2(R) steps instead of R, from three ideas:

1. Insert G into the recursion (the lambda return of Sutton and Barto, 2nd ed., eq. 12.2) and unroll it:

       x_t = (1 - lam) V_t + lam r_t           G_t = r_t + gamma sum_{j > t} (gamma lam)^(j - t - 1) x_j

   This form sums one series instead of two, and no values cancel: lam = 1 gives the discounted sum of rewards.
2. Pack the unmasked tokens of a row next to each other. Masked-out tokens (tool output within a response) then do not
   exist. The paper has no masked-out tokens.
3. Sum by doubling: add the term one token ahead, then the sums two and four tokens ahead (Hillis and Steele 1986).

This module adds no value after the last token: a bootstrap value is part of the last reward (`rewards.bootstrapped`).
The caller whitens the advantages.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# This many tokens stay in the CPU cache while their sums double. The number affects speed only.
CHUNK_TOKENS = 2**18


def gae(
    rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    gamma: float,
    lam: float | Float[Tensor, " B"],
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Return advantages and returns, both exactly 0 where masked out, and without a gradient.

        A_t = sum_{l >= 0} (gamma lam)^l (r_t+l + gamma V_t+l+1 - V_t+l)        G_t = A_t + V_t

    t counts the unmasked tokens of a row: masked positions apply neither gamma nor lam, and a reward there is
    ignored. lam is one number for all rows, or one per row. Source: Schulman et al. 2016, eq. 16. The paper has no
    masked positions; they are skipped as in NeMo-RL and verl.

    Raises ValueError if gamma or a lam is not between 0 and 1.
    """
    lams = torch.as_tensor(lam, dtype=torch.float64, device=rewards.device).expand(rewards.shape[0])
    _require_fraction("gamma", torch.tensor(gamma))
    _require_fraction("lam", lams)
    rows_at_once = max(1, CHUNK_TOKENS // max(1, rewards.shape[1]))
    chunks = (torch.split(x, rows_at_once) for x in (rewards, values, mask, lams[:, None]))
    with torch.no_grad():
        chunk_results = [_gae_of_chunk(r, v, m, of_row, gamma) for r, v, m, of_row in zip(*chunks, strict=True)]
    advantages, returns = (torch.cat(grids) for grids in zip(*chunk_results, strict=True))
    return advantages, returns


def monte_carlo(rewards: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], *, gamma: float) -> Float[Tensor, "B R"]:
    """Return the discounted sum of rewards from each unmasked token on, 0 where masked out. This estimator reads no
    values.

        G_t = sum_{l >= 0} gamma^l r_t+l

    Source: Williams 1992 (REINFORCE). With gamma 1 and no KL in the reward, this is NeMo-RL's `raw_reward`.
    Raises ValueError if gamma is not between 0 and 1.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[1]


def length_adaptive_lambda(mask: Bool[Tensor, "B R"], *, alpha: float) -> Float[Tensor, " B"]:
    """Return GAE's lambda of each row from its number n of unmasked tokens, in float64.

        1 - 1 / max(1, alpha n)

    The horizon 1 / (1 - lambda), over which rewards are distributed, is thus alpha times the length. Up to 1 / alpha
    tokens, lambda is 0. Source: VAPO, arXiv:2504.05118, eq. 7. The paper has no lower bound; the 1 in max is
    NeMo-RL's.
    """
    return 1.0 - 1.0 / (alpha * mask.sum(dim=1, dtype=torch.float64)).clamp(min=1.0)


def _gae_of_chunk(rewards: Tensor, values: Tensor, mask: Tensor, lam: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    returns = rewards + gamma * _discounted_future(rewards, values, mask, gamma, lam)
    return torch.where(mask, returns - values, 0), torch.where(mask, returns, 0)


def _discounted_future(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """Return sum_{j > t} (gamma lam)^(j - t - 1) x_j at unmasked positions; other positions are undefined. lam is
    `[rows, 1]`."""
    # The k-th unmasked token of a row goes to column k = 1, 2, ...; all masked tokens go to column 0, which is
    # ignored. The last column stays empty: it is the future of the last token.
    column = mask.cumsum(dim=1).masked_fill_(~mask, 0)
    packed = rewards.new_zeros(mask.shape[0], mask.shape[1] + 2)
    # Subtract lam from 1 in float64: the sum multiplies an error of 1 - lam by up to 1 / (1 - lam).
    packed.scatter_(1, column, torch.lerp(rewards, values, (1.0 - lam).to(rewards.dtype)))
    return _suffix_sums(packed, decay=gamma * lam)[:, 1:].gather(1, column)


def _suffix_sums(x: Float[Tensor, "m C"], *, decay: Float[Tensor, "m 1"]) -> Float[Tensor, "m C"]:
    """Return s_t = sum_{j >= t} decay^(j - t) x_j along each row. decay is per row, in float64, so that its powers
    stay exact."""
    reach = 1
    while reach < x.shape[1]:
        # Each sum covers `reach` columns; adding the sum that starts where this sum ends doubles the number of
        # columns.
        x = torch.cat([torch.addcmul(x[:, :-reach], x[:, reach:], decay.to(x.dtype)), x[:, -reach:]], dim=1)
        reach, decay = 2 * reach, decay.square()
    return x


def _require_fraction(name: str, values: Tensor) -> None:
    """Raise ValueError that names the first value that is not between 0 and 1."""
    for value in values[~((values >= 0) & (values <= 1))].flatten()[:1].tolist():
        raise ValueError(f"{name} is {value}: it must be between 0 and 1")
