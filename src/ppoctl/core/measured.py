"""Passes of models and transfers of weights that this process has measured, until a stage reads them.

The code that calls ranks and engines reports to `MEASUREMENTS`, and `plan/throughput.py` computes rates from
them. Neither depends on the other. This module imports only the standard library.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from ppoctl.core.clock import WORK

PassKind = Literal["forward", "reference", "train"]
"""Kind of a pass. reference: forward with the reference of the model; train: forward and backward."""


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


@dataclass(frozen=True)
class Measured:
    """Measurements of one stage."""

    passes: tuple[MeasuredPass, ...] = ()
    transfer_s: float = 0.0
    """Seconds in which weights were sent to engines and verified."""


class Measurements:
    """Measurements that no stage has read yet."""

    def __init__(self) -> None:
        self._measured = Measured()

    def add_pass(self, ended: MeasuredPass) -> None:
        """Add passes that have ended."""
        self._measured = replace(self._measured, passes=(*self._measured.passes, ended))

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Context of a transfer of weights."""
        began = WORK.now()
        yield
        self._measured = replace(self._measured, transfer_s=self._measured.transfer_s + WORK.now() - began)

    def take(self) -> Measured:
        """Return and forget all measurements."""
        taken, self._measured = self._measured, Measured()
        return taken


MEASUREMENTS = Measurements()
"""Measurements of this process."""
