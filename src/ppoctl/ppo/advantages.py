"""Generalised advantage estimation over rows with holes, without a loop over time.

The textbook recursion runs from the last token to the first (Schulman et al. 2016, arXiv:1506.02438, eq. 16):

    delta_t = r_t + gamma V_t+1 - V_t          A_t = delta_t + gamma lam A_t+1          G_t = A_t + V_t

Here the same numbers come from three ideas:

1. Put G into the recursion (the lambda return of Sutton and Barto, 2nd ed., eq. 12.2) and unroll it:

       x_t = (1 - lam) V_t + lam r_t           G_t = r_t + gamma sum_{j > t} (gamma lam)^(j - t - 1) x_j

   One series is summed instead of two, and no values cancel: lam = 1 gives the discounted sum of rewards itself.
2. Pack the counted tokens of a row side by side. A hole (tool output in mid-response) then does not exist.
3. Sum blocks by a product with a triangular matrix of powers, and the sums of the blocks the same way.

There is no bootstrap behind the last token: a truncated response is valued like a finished one (as in NeMo-RL
and verl). Whitening is the caller's.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

# Speed only. A block of 64 columns keeps the product cheap; half a million tokens at a time stay in the cache.
BLOCK_COLUMNS = 64
CHUNK_TOKENS = 2**19


def gae(
    rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Advantages and returns, both exactly 0 under the mask and without a gradient.

        A_t = sum_{l >= 0} (gamma lam)^l (r_t+l + gamma V_t+l+1 - V_t+l)        G_t = A_t + V_t

    with t counting the counted tokens of a row: masked positions cost neither gamma nor lam, and a reward there
    is not seen. Source: Schulman et al. 2016, eq. 16; carry over holes as in NeMo-RL and verl.

    On a GPU the sums obey `torch.set_float32_matmul_precision`: TF32 leaves only 3 digits, so keep "highest".
    Raises ValueError when gamma or lam lies outside 0 to 1.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} is {number}: it must lie between 0 and 1")
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    rows_at_once = max(1, CHUNK_TOKENS // max(1, rewards.shape[1]))
    # Autocast would run the block products in bfloat16.
    with torch.no_grad(), torch.autocast(rewards.device.type, enabled=False):
        for start in range(0, rewards.shape[0], rows_at_once):
            rows = slice(start, start + rows_at_once)
            future = _discounted_future(rewards[rows], values[rows], mask[rows], gamma=gamma, lam=lam)
            gains = future.add_(rewards[rows])
            zero = gains.new_zeros(())
            torch.where(mask[rows], gains, zero, out=returns[rows])
            torch.where(mask[rows], gains.sub_(values[rows]), zero, out=advantages[rows])
    return advantages, returns


def _discounted_future(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Tensor:
    """gamma sum_{j > t} (gamma lam)^(j - t - 1) x_j at counted positions, and junk elsewhere."""
    num_rows, num_columns = mask.shape
    # The k-th counted token of a row goes to column k = 1, 2, ...; everything masked is thrown onto column 0.
    column = mask.cumsum(dim=1).masked_fill_(~mask, 0)
    # One column for the throw-away, one behind the last token for its empty future, up to whole blocks.
    width = -(-(num_columns + 2) // BLOCK_COLUMNS) * BLOCK_COLUMNS
    packed = rewards.new_zeros(num_rows, width).scatter_(1, column, torch.lerp(values, rewards, lam))
    # NaN on column 0 would spread: a matrix product multiplies it by the zeros of the triangle.
    packed[:, 0] = 0
    sums = _suffix_sums(packed, decay=gamma * lam)
    return sums[:, 1:].gather(1, column).mul_(gamma)


def _suffix_sums(x: Tensor, *, decay: float) -> Tensor:
    """s_t = sum_{j >= t} decay^(j - t) x_j along each row: in blocks, then over the blocks in the same way."""
    num_rows, num_columns = x.shape
    num_blocks = -(-num_columns // BLOCK_COLUMNS)
    if num_columns % BLOCK_COLUMNS:
        x = pad(x, (0, num_blocks * BLOCK_COLUMNS - num_columns))
    # Powers in float64: 0.95^63 in float32 would already carry the error of a rounded base 63 times.
    powers = torch.tensor(decay, dtype=torch.float64) ** torch.arange(BLOCK_COLUMNS + 1)
    powers = powers.to(device=x.device, dtype=x.dtype)
    index = torch.arange(BLOCK_COLUMNS, device=x.device)
    triangle = powers[(index[:, None] - index).clamp(min=0)].tril()
    sums = (x.reshape(-1, BLOCK_COLUMNS) @ triangle).view(num_rows, num_blocks, BLOCK_COLUMNS)
    if num_blocks > 1:
        # What lies behind a block enters it at its right edge: the sum at the first column of the next block.
        heads = _suffix_sums(sums[:, :, 0], decay=decay**BLOCK_COLUMNS)
        sums[:, :-1].addcmul_(heads[:, 1:, None], powers[1:].flip(0))
    return sums.view(num_rows, -1)[:, :num_columns]
