"""A loss as a sum of terms, each of which says what it divides by.

    loss = sum over terms of   coef * aggregation.summed(token losses) / aggregation.total(mask of the minibatch)

The totals are counted once per minibatch, over all microbatches and ranks; a microbatch adds its share of the sums.
So no memory setting and no layout changes a loss or a gradient, whatever a term divides by.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl.ports import OutputRequest, TokenOutputs, Totals
from ppoctl.ppo.aggregation import Aggregation, TokenMean


@dataclass(frozen=True)
class LossInputs:
    """What the model says of m rows of the step; the grids of the step are cut to them."""

    rows: Int[Tensor, " m"]
    values: Float[Tensor, "m R"]
    """Log-probs of the response tokens (actor) or values of the states before them (critic); 0 where not present."""
    entropy: Float[Tensor, "m R"] | None
    """Nats; absent where no term reads it."""
    full_kl: Float[Tensor, "m R"] | None = None
    """Whole KL from the reference in nats; absent where no term reads it."""

    def of(self, grid: Tensor) -> Tensor:
        """These rows of a `[B, R]` grid of the step, on the model's device."""
        return grid[self.rows].to(self.values.device)


@runtime_checkable
class TokenLoss(Protocol):
    """The loss of each token, before anything is summed."""

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        """Exactly 0 under the mask, and so is its gradient."""
        ...


@dataclass(frozen=True)
class Term:
    """One addend of an objective."""

    loss: TokenLoss
    mask: Bool[Tensor, "B R"]
    """The tokens it counts, of all rows of the step."""
    coef: float = 1.0
    aggregation: Aggregation = field(default_factory=TokenMean)
    name: str = "loss"
    """What it is called in figures."""

    def total(self, rows: Int[Tensor, " M"]) -> int:
        return self.aggregation.total(self.mask[rows])

    def share(self, outputs: LossInputs, total: int) -> Float[Tensor, ""]:
        """What some rows add to the loss of a minibatch with this total."""
        mask = outputs.of(self.mask)
        return self.coef * (self.aggregation.summed(self.loss(outputs, mask), mask) / total)


@dataclass(frozen=True)
class Terms:
    """An objective of these terms (`ports.Objective`)."""

    terms: Sequence[Term]
    scored: OutputRequest = field(default_factory=OutputRequest)
    """How the model is scored; entropies are asked for too where a term reads them."""

    @property
    def request(self) -> OutputRequest:
        entropy = self.scored.entropy or any(term.loss.needs_entropy for term in self.terms)
        return replace(self.scored, entropy=entropy)

    def totals(self, rows: Int[Tensor, " M"]) -> Totals:
        return tuple(term.total(rows) for term in self.terms)

    def __call__(self, rows: Int[Tensor, " m"], said: TokenOutputs, totals: Totals) -> Float[Tensor, ""]:
        return sum((share for _, share in self.shares(rows, said, totals)), start=said.primary.new_zeros(()))

    def shares(
        self, rows: Int[Tensor, " m"], said: TokenOutputs, totals: Totals
    ) -> list[tuple[Term, Float[Tensor, ""]]]:
        """Each term with what it adds to the loss; terms in which nothing of the minibatch counts are left out."""
        seen = LossInputs(rows, said.primary, said.entropy, said.full_kl)
        return [(term, term.share(seen, total)) for term, total in zip(self.terms, totals, strict=True) if total]
