"""The recipe's tables of advantages: how rewards and values become what the updates read."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.table import RESULTS, Fraction, Positive, Table


class GaeAdvantages(Table):
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16)."""

    kind: Annotated[Literal["gae"], RESULTS]
    """Generalised advantage estimation: A_t = sum of (gamma lambda)^l (r + gamma V' - V)."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, RESULTS, Fraction] = 1.0
    """GAE's lambda. 1: Monte Carlo returns minus values; 0: one-step TD errors."""
    gae_lambda_value: Annotated[float | None, RESULTS, Fraction] = None
    """Lambda of the returns that the critic learns, apart from the policy's (VC-PPO, arXiv:2503.01491; 1 there and in
    VAPO); absent: `gae_lambda`."""
    length_adaptive_alpha: Annotated[float | None, RESULTS, Positive] = None
    """Lambda of the policy's advantages by length: 1 - 1 / max(1, alpha n) for a response of n counted tokens (VAPO,
    arXiv:2504.05118, where it is 0.05); absent: `gae_lambda`."""
    whiten: Annotated[bool, RESULTS] = True
    """Shift and scale advantages to zero mean and unit variance over all counted tokens of the step."""


class MonteCarloAdvantages(Table):
    """Discounted returns as they are, without a critic's values (Williams 1992). The critic learns them all the
    same. With gamma 1 and no KL in the reward each token's is the reward of its response (NeMo-RL's `raw_reward`)."""

    kind: Annotated[Literal["monte_carlo"], RESULTS]
    """Discounted sum of rewards: A_t = sum of gamma^l r."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    whiten: Annotated[bool, RESULTS] = True
    """Shift and scale advantages to zero mean and unit variance over all counted tokens of the step."""


Advantages = Annotated[GaeAdvantages | MonteCarloAdvantages, Field(discriminator="kind")]
