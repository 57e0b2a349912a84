"""Order in which the rows are used, epoch after epoch. The order is a pure function of the seed.

an epoch of one set:   a permutation of its rows
an epoch of a mix:     a permutation of [each row of source A, weight_A times | each row of source B, weight_B times]
fraction of a weight:  the next rows of an endless sequence of permutations of the source, continued in the next epoch
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ppoctl.core.batch.seeds import derive_seed
from ppoctl.data.row_files import in_an_epoch

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class SourceShare:
    """Rows of a source, and how often each row is in an epoch."""

    rows: int
    weight: float = 1.0
    """Number of times that each row is in an epoch. If the number has a fraction, some rows are in it once more."""


@dataclass(frozen=True)
class Order:
    """Order of the rows of one or several sources. Rows are numbered across sources, one source after another."""

    shares: tuple[SourceShare, ...]
    seed: int

    @property
    def epoch_rows(self) -> int:
        """Number of rows of one epoch."""
        return sum(in_an_epoch(share.rows, share.weight) for share in self.shares)

    def row(self, position: int) -> int:
        """Return the number of the row at a position. Positions are counted from 0 over all epochs."""
        epoch, offset = divmod(position, self.epoch_rows)
        return int(_epoch(self, epoch)[offset])


@lru_cache(maxsize=2)
def _epoch(order: Order, epoch: int) -> "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]":
    """Return the numbers of the rows of one epoch, shape [epoch_rows].

    The result is cached: computing it takes some microseconds per row, and consecutive steps use the same epoch.
    """
    import numpy

    parts: Sequence[numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]] = []
    start = 0
    for number, share in enumerate(order.shares):
        every = numpy.tile(numpy.arange(share.rows), int(share.weight))
        more = _more(order, number, epoch, in_an_epoch(share.rows, share.weight) - len(every))
        parts = [*parts, start + every, start + more]
        start += share.rows
    rows = numpy.concatenate(parts)
    return rows[_permutation(len(rows), order.seed, "prompts", epoch)]


def _more(order: Order, number: int, epoch: int, count: int) -> "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]":
    """Return the rows that the fractional part of a weight adds to an epoch."""
    import numpy

    rows, chunks, at = order.shares[number].rows, [numpy.arange(0)], epoch * count
    while count:
        repetition, offset = divmod(at, rows)
        taken = _permutation(rows, order.seed, "mix", number, repetition)[offset : offset + count]
        chunks.append(taken)
        at, count = at + len(taken), count - len(taken)
    return numpy.concatenate(chunks)


def _permutation(rows: int, *parts: object) -> "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]":
    """Return a random order of the rows. Sorting by hash gives the same order in every version of numpy."""
    import numpy

    keys = numpy.fromiter((derive_seed(*parts, row) for row in range(rows)), numpy.int64, rows)
    return numpy.argsort(keys, kind="stable")
