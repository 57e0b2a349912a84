"""Selection of a random subset of the slow test cases, with a seed, so that anyone can repeat it."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One end-to-end test, or one case of its grid."""

    name: str
    minutes: float = 0.0
    """Minutes on two idle cores; 0: a few seconds."""
    grid: str = ""
    """If set, exactly one cell of this grid is selected each time."""


def sampled(name: str, size: int, count: int, pinned: Collection[int] = ()) -> set[int]:
    """Return the numbers of the cases of a grid that `make test` runs: `count` evenly spaced ones, which follow from
    the name of the grid, and the pinned ones. Neighbors differ in only one value, and must not all be inside or
    outside the subset."""
    start, stride = random.Random(name).random(), max(1.0, size / count)
    return {int((number + start) * stride) for number in range(count)} & set(range(size)) | set(pinned)


def draw(cells: Sequence[Cell], seed: str, one_in: int) -> set[str]:
    """Return the names of the cells to run. Each cell is selected with a probability of at least 1 / `one_in`.

    Cells of similar length form blocks of `one_in`, and one cell of each block is selected. So the selection never
    takes more minutes than 1 / `one_in` of the total plus the longest cell.
    """
    # A separate generator for each block: the selection from a block must not depend on the number of other blocks.
    return {
        random.Random(f"{seed} {block[0].name}").choice(block).name
        for block in [*_grids(cells), *_blocks(cells, one_in)]
    }


def _grids(cells: Sequence[Cell]) -> list[list[Cell]]:
    names = sorted({cell.grid for cell in cells if cell.grid})
    return [_in_order([cell for cell in cells if cell.grid == name]) for name in names]


def _blocks(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    others = _in_order([cell for cell in cells if not cell.grid])
    return [others[start : start + size] for start in range(0, len(others), size)]


def _in_order(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (-cell.minutes, cell.name))
