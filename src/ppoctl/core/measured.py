"""Passes of models over sequences that trainers of this process have measured, until a stage reads them.

The code that calls the ranks reports its passes (`PASSES.add`), and `plan/throughput.py` computes rates from
them. Neither depends on the other. This module imports only the standard library.
"""

from dataclasses import dataclass, field
from typing import Literal

PassKind = Literal["forward", "train"]
"""Kind of a pass; train: forward and backward."""


@dataclass(frozen=True)
class MeasuredPass:
    """Passes of a role's model over some sequences, with all ranks."""

    role: str
    kind: PassKind
    tokens: int
    """Number of tokens that the model reads: prompt + response - 1 of each sequence."""
    pairs: int
    """Number of pairs of a token and a token of its sequence that it attends to: n (n + 1) / 2 of n tokens."""
    outputs: int
    """Number of positions whose outputs are computed: the response tokens."""
    seconds: float
    with_reference: bool = False
    """Whether the reference computes the same tokens in the same call."""


@dataclass
class MeasuredPasses:
    """Passes that no stage has read yet."""

    _passes: list[MeasuredPass] = field(default_factory=list)

    def add(self, measured: MeasuredPass) -> None:
        """Add passes that have ended."""
        self._passes.append(measured)

    def take(self) -> list[MeasuredPass]:
        """Return and forget all passes."""
        taken, self._passes = self._passes, []
        return taken


PASSES = MeasuredPasses()
"""Passes of this process."""
