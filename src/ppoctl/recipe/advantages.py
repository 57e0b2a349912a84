"""Recipe tables of the advantages, which are computed from rewards and values."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ppoctl.recipe_table import RESULTS, Fraction, Positive, Table


class GaeAdvantages(Table):
    """Generalized advantage estimation (GAE). The advantage of a token is a discounted sum of TD errors: how much
    better the rest of the response turned out than the critic predicted. Masked tokens inside a response are skipped
    and are not discounted by gamma or lambda.

    Formula: A_t = sum over l of (gamma lambda)^l (r_t+l + gamma V_t+l+1 - V_t+l); return G_t = A_t + V_t, in which
    A_t uses gae_lambda_value if it is written
    Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16; two lambdas: VC-PPO (arXiv:2503.01491)
    Default of: verl (gamma and lambda 1, whitened); NeMo-RL, TRL and trlX use lambda 0.95
    Figures: advantage/raw_mean, advantage/raw_std, value/explained_variance
    """

    trains_critic: ClassVar[bool] = True
    """Whether the step trains a critic on the returns of these advantages."""
    kind: Annotated[Literal["gae"], RESULTS]
    """Generalized advantage estimation."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, RESULTS, Fraction] = 1.0
    """GAE's lambda. 1: Monte Carlo returns minus values; 0: one-step TD errors."""
    gae_lambda_value: Annotated[float | None, RESULTS, Fraction] = None
    """Separate lambda for the returns that the critic learns (1 in VC-PPO and VAPO); absent: `gae_lambda`."""
    length_adaptive_alpha: Annotated[float | None, RESULTS, Positive] = None
    """Factor that makes lambda of the actor's advantages depend on the length of the response: lambda approaches 1 as
    the number n of unmasked tokens grows. Absent: `gae_lambda` for every response.

    Formula: lambda = 1 - 1 / max(1, length_adaptive_alpha n)
    Source: VAPO (arXiv:2504.05118), eq. 7, with 0.05; the lower bound of 1 is from NeMo-RL
    Default of: verl and NeMo-RL (off)
    Figures: advantage/lambda_mean
    """
    whiten: Annotated[bool, RESULTS] = True
    """Whether advantages are shifted and scaled to zero mean and unit variance over all unmasked tokens of the
    step."""


class MonteCarloAdvantages(Table):
    """Discounted returns, without the critic's values. The only exception is `ppo.truncated = "bootstrap"`, which
    adds the critic's bootstrap value after the last token of a truncated response. The critic is still trained on
    these returns. With gamma 1 and no KL in the reward, every token gets the reward of its response; NeMo-RL's
    `raw_reward` was intended to do this.

    Formula: A_t = G_t = sum over l of gamma^l r_t+l
    Source: Williams 1992 (REINFORCE)
    Default of: no system
    Figures: advantage/raw_mean, advantage/raw_std
    """

    trains_critic: ClassVar[bool] = True
    """Whether the step trains a critic on the returns of these advantages."""
    kind: Annotated[Literal["monte_carlo"], RESULTS]
    """Discounted sum of rewards."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    whiten: Annotated[bool, RESULTS] = True
    """Whether advantages are shifted and scaled to zero mean and unit variance over all unmasked tokens of the
    step."""


AdvantagesTable = Annotated[GaeAdvantages | MonteCarloAdvantages, Field(discriminator="kind")]
