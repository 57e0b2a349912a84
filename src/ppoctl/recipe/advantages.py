"""The recipe's tables of advantages: how rewards and values become what the updates read."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.recipe_table import RESULTS, Fraction, Positive, Table


class GaeAdvantages(Table):
    """Generalised advantage estimation: a token is as good as what comes after it is better than the critic expected.
    Masked tokens in mid-response are stepped over, and cost neither gamma nor lambda.

    Formula: A_t = sum over l of (gamma lambda)^l (r_t+l + gamma V_t+l+1 - V_t+l); return G_t = A_t + V_t, with
        gae_lambda_value in the critic's
    Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16; two lambdas: VC-PPO (arXiv:2503.01491)
    Default of: verl (gamma and lambda 1, whitened); NeMo-RL, TRL and trlX have lambda 0.95
    Figures: advantage/raw_mean, advantage/raw_std, value/explained_variance
    """

    kind: Annotated[Literal["gae"], RESULTS]
    """Generalised advantage estimation."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, RESULTS, Fraction] = 1.0
    """GAE's lambda. 1: Monte Carlo returns minus values; 0: one-step TD errors."""
    gae_lambda_value: Annotated[float | None, RESULTS, Fraction] = None
    """Lambda of the returns that the critic learns, apart from the policy's (1 in VC-PPO and VAPO); absent:
    `gae_lambda`."""
    length_adaptive_alpha: Annotated[float | None, RESULTS, Positive] = None
    """Lambda of the policy's advantages by length: the longer a response of n counted tokens, the nearer to 1;
    absent: `gae_lambda`.

    Formula: lambda = 1 - 1 / max(1, length_adaptive_alpha n)
    Source: VAPO (arXiv:2504.05118), eq. 7, where it is 0.05; the bound is NeMo-RL's
    Default of: verl and NeMo-RL (off)
    Figures: advantage/lambda_mean
    """
    whiten: Annotated[bool, RESULTS] = True
    """Shift and scale advantages to zero mean and unit variance over all counted tokens of the step."""


class MonteCarloAdvantages(Table):
    """Discounted returns as they are, without the critic's values, except with `ppo.truncated = "bootstrap"`, which
    adds the critic's value behind the last token of a truncated response. The critic is trained on them all the same.
    With gamma 1 and no KL in the reward each token has the reward of its response, as NeMo-RL's `raw_reward` meant.

    Formula: A_t = G_t = sum over l of gamma^l r_t+l
    Source: Williams 1992 (REINFORCE)
    Default of: nobody
    Figures: advantage/raw_mean, advantage/raw_std
    """

    kind: Annotated[Literal["monte_carlo"], RESULTS]
    """Discounted sum of rewards."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    whiten: Annotated[bool, RESULTS] = True
    """Shift and scale advantages to zero mean and unit variance over all counted tokens of the step."""


AdvantagesTable = Annotated[GaeAdvantages | MonteCarloAdvantages, Field(discriminator="kind")]
