"""Passes of models, transfers of weights and moves of models that this process has measured, until a stage reads
them.

The code that calls ranks and engines reports to `MEASUREMENTS`, and `plan/throughput.py` computes metrics from
them. Neither depends on the other. A rank has its own `MEASUREMENTS`: `core/machine/process_usage.py` returns its
moves to the driver. This module imports only the standard library.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    peak_bytes: int = 0
    """Largest memory peak of a rank during the passes; 0: unknown."""
    expert_loads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layer with experts -> number of tokens that were routed to each expert, over all ranks. Tensor ranks count the
    same tokens."""
    replayed: tuple[int, int] = (0, 0)
    """Number of given experts that the routers would not have chosen, and number of all given experts, over all
    ranks."""
    router_aux_loss: tuple[float, float] = (0.0, 0.0)
    """Sum of the balance losses of layers and minibatches, and their number, over all ranks."""


@dataclass(frozen=True)
class ProcessUsage:
    """Use of the machine by one process since the last reading."""

    peak_bytes: int
    """Peak of the memory; 0: unknown."""
    moved_s: float
    """Seconds in which the process moved tensors between host memory and the device."""
    expert_loads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layer with experts -> number of tokens that were routed to each expert."""
    replayed: tuple[int, int] = (0, 0)
    """Number of given experts that the routers would not have chosen, and number of all given experts."""
    router_aux_loss: tuple[float, float] = (0.0, 0.0)
    """Contributions to the sum of the balance losses of layers and minibatches, and to their number."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one stage."""

    passes: tuple[MeasuredPass, ...] = ()
    transfer_s: float = 0.0
    """Seconds in which weights were sent to engines and verified."""
    moved_s: float = 0.0
    """Seconds in which models were moved between devices and host memory."""
    engine_peak_bytes: int = 0
    """Largest memory peak of a process of an engine; 0: unknown."""
    aborted_tokens: int = 0
    """Number of tokens that engines had generated of requests that were aborted."""

    def __add__(self, other: "Measured") -> "Measured":
        """Return what two threads measured for one stage."""
        return Measured(
            (*self.passes, *other.passes),
            self.transfer_s + other.transfer_s,
            self.moved_s + other.moved_s,
            max(self.engine_peak_bytes, other.engine_peak_bytes),
            self.aborted_tokens + other.aborted_tokens,
        )


def added(loads: Iterable[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    """Return layer -> the sum of the numbers of tokens of each expert."""
    total: dict[int, list[int]] = {}
    for each in loads:
        for layer, counts in each.items():
            total[layer] = [a + b for a, b in zip(total.get(layer, [0] * len(counts)), counts, strict=True)]
    return total


class Measurements(threading.local):
    """Measurements that no stage has read yet. Each thread has its own: another stage may run in another thread."""

    def __init__(self) -> None:
        self._measured = Measured()

    def add_pass(self, ended: MeasuredPass, ranks: Sequence[ProcessUsage] = ()) -> None:
        """Add passes that have ended, with the usage of each rank. The work clock is stopped during passes of a
        replay, which belong to no stage."""
        if ended.seconds > 0:
            peak_bytes = max((rank.peak_bytes for rank in ranks), default=0)
            others, given = (sum(counts) for counts in zip((0, 0), *(rank.replayed for rank in ranks), strict=True))
            losses = zip((0.0, 0.0), *(rank.router_aux_loss for rank in ranks), strict=True)
            loss, number = (sum(contributions) for contributions in losses)
            ended = replace(
                ended,
                peak_bytes=peak_bytes,
                expert_loads=added(rank.expert_loads for rank in ranks),
                replayed=(others, given),
                router_aux_loss=(loss, number),
            )
            moved_s = self._measured.moved_s + max((rank.moved_s for rank in ranks), default=0.0)
            self._measured = replace(self._measured, passes=(*self._measured.passes, ended), moved_s=moved_s)

    def add_engine(self, processes: Sequence[ProcessUsage]) -> None:
        """Add the usage of the processes of an engine."""
        peaks = (process.peak_bytes for process in processes)
        self._measured = replace(self._measured, engine_peak_bytes=max([self._measured.engine_peak_bytes, *peaks]))

    def add_aborted(self, tokens: int) -> None:
        """Add tokens of aborted requests."""
        self._measured = replace(self._measured, aborted_tokens=self._measured.aborted_tokens + tokens)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Context of a transfer of weights."""
        began = WORK.now()
        yield
        self._measured = replace(self._measured, transfer_s=self._measured.transfer_s + WORK.now() - began)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Context of a move of models between a device and host memory. Contexts are not nested."""
        began = WORK.now()
        yield
        self._measured = replace(self._measured, moved_s=self._measured.moved_s + WORK.now() - began)

    def take_moved_s(self) -> float:
        """Return and forget the seconds of moves."""
        moved_s, self._measured = self._measured.moved_s, replace(self._measured, moved_s=0.0)
        return moved_s

    def take(self) -> Measured:
        """Return and forget all measurements."""
        taken, self._measured = self._measured, Measured()
        return taken


MEASUREMENTS = Measurements()
"""Measurements of this process."""
