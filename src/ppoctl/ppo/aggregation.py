"""How the losses of tokens become one number: what is summed, and what the sum is divided by.

    loss of a minibatch = sum over its rows of   summed(token losses) / total(mask of the minibatch)

The total is counted once over the whole minibatch, and a row is never split over microbatches or ranks; so the sums
over any cut of a minibatch add up to the same loss and gradient. A row without a counted token is in no total.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

AggregationKind = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]


@runtime_checkable
class Aggregation(Protocol):
    """A way from token losses to one number."""

    def total(self, mask: Bool[Tensor, "M R"]) -> int:
        """What the sum over a whole minibatch is divided by; 0 where nothing counts."""
        ...

    def summed(self, losses: Float[Tensor, "m R"], mask: Bool[Tensor, "m R"]) -> Float[Tensor, ""]:
        """The share of some rows in that sum. `losses` are exactly 0 under the mask."""
        ...


@dataclass(frozen=True)
class TokenMean:
    """The mean over all counted tokens of the minibatch: long responses weigh more (DAPO, arXiv:2503.14476)."""

    def total(self, mask: Bool[Tensor, "M R"]) -> int:
        return int(mask.sum())

    def summed(self, losses: Float[Tensor, "m R"], mask: Bool[Tensor, "m R"]) -> Float[Tensor, ""]:  # noqa: ARG002 - others count
        return losses.sum()


@dataclass(frozen=True)
class SequenceMean:
    """The mean over sequences of each one's token sum over its length: all sequences weigh the same.

        loss = 1/G sum_i  sum_t l_it / n_i

    n_i counted tokens of sequence i, G sequences that have one. In each response of twice the length a token weighs
    half (GRPO, arXiv:2402.03300, eq. 3; GSPO, arXiv:2507.18071, eq. 5).
    """

    def total(self, mask: Bool[Tensor, "M R"]) -> int:
        return _sequences(mask)

    def summed(self, losses: Float[Tensor, "m R"], mask: Bool[Tensor, "m R"]) -> Float[Tensor, ""]:
        return (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()


@dataclass(frozen=True)
class SequenceSum:
    """The mean over sequences of each one's token sum over a length that is the same for all.

        loss = 1/G sum_i  sum_t l_it / length_tokens

    G sequences that have a counted token. With the longest length that a response may have: Dr. GRPO
    (arXiv:2503.20783), in which a token weighs the same in every response. With 1: the plain sum, the log-likelihood
    of a sequence. Raises ValueError when the length is not positive.
    """

    length_tokens: int = 1

    def __post_init__(self) -> None:
        if not self.length_tokens > 0:
            raise ValueError(f"length_tokens is {self.length_tokens}: it must be positive")

    def total(self, mask: Bool[Tensor, "M R"]) -> int:
        return _sequences(mask)

    def summed(self, losses: Float[Tensor, "m R"], mask: Bool[Tensor, "m R"]) -> Float[Tensor, ""]:  # noqa: ARG002 - others count
        return losses.sum() / self.length_tokens


def aggregation(kind: AggregationKind, *, max_new_tokens: int) -> Aggregation:
    """The aggregation that a recipe calls `kind`; `max_new_tokens` is the longest a response may be, and read by
    `fixed_length` alone."""
    if kind == "token_mean":
        return TokenMean()
    if kind == "sequence_mean_token_mean":
        return SequenceMean()
    return SequenceSum(max_new_tokens if kind == "fixed_length" else 1)


def _sequences(mask: Bool[Tensor, "M R"]) -> int:
    return int(torch.any(mask, dim=1).sum())
