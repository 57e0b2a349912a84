"""Loss as a sum of terms, each with its own divisor.

    loss = sum over terms of   coef * aggregation.summed(token losses) / aggregation.total(mask of the minibatch)

The totals are counted once per minibatch, over all microbatches and ranks; each microbatch adds its contribution to
the sums. No memory setting or layout therefore changes a loss or a gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl.algorithms.formulas.aggregation import Aggregation, TokenMean
from ppoctl.core.ports import OutputRequest, TokenOutputs, Totals


@dataclass(frozen=True)
class LossInputs:
    """Outputs of the model for m rows of the step, and access to the step's grids for these rows."""

    rows: Int[Tensor, " m"]
    primary: Float[Tensor, "m R"]
    """Log-probs of the response tokens (actor) or values of the states before them (critic); 0 at positions without a
    token."""
    entropy: Float[Tensor, "m R"] | None
    """Entropy in nats; None: no term reads it."""
    full_kl: Float[Tensor, "m R"] | None = None
    """Full KL from the reference in nats; None: no term reads it."""
    values: Float[Tensor, "m R"] | None = None
    """Values of the states before the tokens, by a value head on the policy's model; None: there is no such head."""

    def of(self, grid: Tensor) -> Tensor:
        """Return these rows of a `[B, R]` grid of the step, on the model's device."""
        return grid[self.rows].to(self.primary.device)


def loss_inputs(rows: Int[Tensor, " m"], outputs: TokenOutputs) -> LossInputs:
    """Return the outputs of a model for these rows as the inputs of losses."""
    return LossInputs(rows, outputs.primary, outputs.entropy, outputs.full_kl, outputs.values)


@runtime_checkable
class TokenLoss(Protocol):
    """Loss of each token, before aggregation."""

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        """Return the losses; loss and gradient are exactly 0 where masked out."""
        ...


@dataclass(frozen=True)
class Term:
    """One addend of an objective."""

    loss: TokenLoss
    mask: Bool[Tensor, "B R"]
    """Tokens of all rows of the step that are in this term."""
    coef: float = 1.0
    aggregation: Aggregation = field(default_factory=TokenMean)
    name: str = "loss"
    """Name in metrics."""

    def total(self, rows: Int[Tensor, " M"]) -> int:
        return self.aggregation.total(self.mask[rows])

    def share(self, outputs: LossInputs, total: int) -> Float[Tensor, ""]:
        """Return the contribution of some rows to the loss of a minibatch with this total."""
        mask = outputs.of(self.mask)
        return self.coef * (self.aggregation.summed(self.loss(outputs, mask), mask) / total)


@dataclass(frozen=True)
class Terms:
    """Objective that is the sum of these terms (`ports.Objective`)."""

    terms: Sequence[Term]
    scored: OutputRequest = field(default_factory=OutputRequest)
    """How log-probs are computed. Entropies are also requested if a term reads them."""

    @property
    def request(self) -> OutputRequest:
        entropy = self.scored.entropy or any(term.loss.needs_entropy for term in self.terms)
        return replace(self.scored, entropy=entropy)

    def totals(self, rows: Int[Tensor, " M"]) -> Totals:
        return tuple(term.total(rows) for term in self.terms)

    def rows_in_loss(self, rows: Int[Tensor, " M"]) -> Int[Tensor, " m"]:
        """Return those of these rows that have a token in a term, in their order."""
        return rows[torch.stack([term.mask[rows].any(dim=1) for term in self.terms]).any(dim=0)]

    def __call__(self, rows: Int[Tensor, " m"], outputs: TokenOutputs, totals: Totals) -> Float[Tensor, ""]:
        return sum((share for _, share in self.shares(rows, outputs, totals)), start=outputs.primary.new_zeros(()))

    def shares(
        self, rows: Int[Tensor, " m"], outputs: TokenOutputs, totals: Totals
    ) -> list[tuple[Term, Float[Tensor, ""]]]:
        """Return each term with its contribution to the loss; terms without a token in the minibatch are left out."""
        inputs = loss_inputs(rows, outputs)
        return [(term, term.share(inputs, total)) for term, total in zip(self.terms, totals, strict=True) if total]
