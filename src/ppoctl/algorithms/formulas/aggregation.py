"""Aggregation of token losses into one number: the sum, and its divisor.

    loss of a minibatch = sum over its rows of   summed(token losses) / total(mask of the minibatch)

The total is counted once over the whole minibatch, and a row is never split over microbatches or ranks. The sums over
any split of a minibatch therefore add up to the same loss and gradient. A row without an unmasked token is in no
total.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

AggregationKind = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]


@runtime_checkable
class Aggregation(Protocol):
    """Maps token losses to one number."""

    def total(self, mask: Bool[Tensor, "M R"]) -> int:
        """Return the divisor of the sum over a whole minibatch; 0 if no token is unmasked."""
        ...

    def summed(self, losses: Float[Tensor, "m R"], mask: Bool[Tensor, "m R"]) -> Float[Tensor, ""]:
        """Return the contribution of some rows to that sum. `losses` must be exactly 0 where masked out."""
        ...


@dataclass(frozen=True)
class TokenMean:
    """Mean over all unmasked tokens of the minibatch; long responses have more weight (DAPO, arXiv:2503.14476)."""

    def total(self, mask: Bool[Tensor, "M R"]) -> int:
        return int(mask.sum())

    def summed(self, losses: Float[Tensor, "m R"], mask: Bool[Tensor, "m R"]) -> Float[Tensor, ""]:  # noqa: ARG002 - read by other aggregations
        return losses.sum()


@dataclass(frozen=True)
class SequenceMean:
    """Mean over sequences of each sequence's token sum, divided by its length: all sequences have the same weight.

        loss = 1/G sum_i  sum_t l_it / n_i

    n_i is the number of unmasked tokens of sequence i, G the number of sequences with an unmasked token. In a
    response of twice the length, a token has half the weight (GRPO, arXiv:2402.03300, eq. 3; GSPO, arXiv:2507.18071,
    eq. 5). In the papers G is the group size; here sequences without an unmasked token are excluded.
    """

    def total(self, mask: Bool[Tensor, "M R"]) -> int:
        return _sequences(mask)

    def summed(self, losses: Float[Tensor, "m R"], mask: Bool[Tensor, "m R"]) -> Float[Tensor, ""]:
        return (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()


@dataclass(frozen=True)
class SequenceSum:
    """Mean over sequences of each sequence's token sum, divided by a length that is the same for all.

        loss = 1/G sum_i  sum_t l_it / length_tokens

    G is the number of sequences with an unmasked token. If length_tokens is the maximum response length, this is Dr.
    GRPO (arXiv:2503.20783), in which a token has the same weight in every response. If it is 1, this is the plain
    sum, the log-likelihood of a sequence. Raises ValueError if the length is not positive.
    """

    length_tokens: int = 1

    def __post_init__(self) -> None:
        if not self.length_tokens > 0:
            raise ValueError(f"length_tokens is {self.length_tokens}: it must be positive")

    def total(self, mask: Bool[Tensor, "M R"]) -> int:
        return _sequences(mask)

    def summed(self, losses: Float[Tensor, "m R"], mask: Bool[Tensor, "m R"]) -> Float[Tensor, ""]:  # noqa: ARG002 - read by other aggregations
        return losses.sum() / self.length_tokens


def aggregation(kind: AggregationKind, *, max_new_tokens: int) -> Aggregation:
    """Return the aggregation that a recipe names `kind`. `max_new_tokens`, the maximum response length, is read only
    by `fixed_length`."""
    if kind == "token_mean":
        return TokenMean()
    if kind == "sequence_mean_token_mean":
        return SequenceMean()
    return SequenceSum(max_new_tokens if kind == "fixed_length" else 1)


def _sequences(mask: Bool[Tensor, "M R"]) -> int:
    return int(torch.any(mask, dim=1).sum())
