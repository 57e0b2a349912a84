"""The recipe's tables of the KL penalty."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.table import RESULTS, Positive, Table


class NoKl(Table):
    """No penalty; no reference model is loaded."""

    place: Annotated[Literal["none"], RESULTS]
    """No penalty."""


class KlInReward(Table):
    """KL penalty in the reward: each token's reward loses coef x its KL estimate (Ziegler et al. 2019)."""

    place: Annotated[Literal["reward"], RESULTS]
    """The penalty is subtracted from the reward of each token."""
    estimator: Annotated[Literal["k1", "k2", "k3"], RESULTS] = "k1"
    """Schulman's estimator of KL(actor, reference) from one sample."""
    coef: Annotated[float, RESULTS, Positive]
    """Fixed coefficient of the penalty."""


class KlInLoss(Table):
    """KL penalty in the loss: coef x mean KL is added to the policy loss."""

    place: Annotated[Literal["loss"], RESULTS]
    """The penalty is added to the policy loss."""
    estimator: Annotated[Literal["k2", "k3"], RESULTS] = "k3"
    """Schulman's estimator of KL; k1 has no useful gradient as a loss (its expectation is zero), so it is not
    offered."""
    coef: Annotated[float, RESULTS, Positive]
    """Fixed coefficient of the penalty."""


Kl = Annotated[NoKl | KlInReward | KlInLoss, Field(discriminator="place")]
