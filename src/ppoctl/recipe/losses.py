"""The recipe's tables of what actor and critic minimise."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.table import RESULTS, NotNegative, Positive, Table

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]


class PolicyLossTable(Table):
    """Clipped surrogate (Schulman et al. 2017, eq. 7)."""

    clip_low: Annotated[float, RESULTS, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, RESULTS, Positive] = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float | None, RESULTS, Field(gt=1)] = None
    """Upper bound of the loss of a token with negative advantage A: -A x this (Ye et al. 2020); absent: none."""
    entropy_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Coefficient of the entropy bonus: this x the mean token entropy is subtracted from the loss."""


class ValueLossTable(Table):
    """Squared error of the critic, optionally clipped around the old values."""

    clip: Annotated[float | None, RESULTS, Positive] = None
    """New values are clipped to old value +- clip, and the larger error counts; absent: off."""
    scale: Annotated[float, RESULTS, Positive] = 1.0
    """Factor of the value loss."""
    aggregation: Annotated[Aggregation, RESULTS] = "token_mean"
    """How the losses of tokens become one number. token_mean: their mean over the minibatch (PPO2, NeMo-RL, verl);
    sequence_mean_token_mean: the mean over sequences of each one's mean; sequence_mean_token_sum: the mean over
    sequences of each one's sum; fixed_length: those sums over `rollout.max_new_tokens`."""
