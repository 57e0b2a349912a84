"""Which cells of the stories are run where not all are: drawn with a seed, so that anyone can draw them again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One story, or one case of its grid."""

    name: str
    minutes: float = 0.0
    """What it takes on two quiet cores; 0 where it is seconds."""
    grid: str = ""
    """Where it is set, exactly one cell of this grid is drawn each time."""


def draw(cells: Sequence[Cell], seed: str, one_in: int) -> set[str]:
    """Names of the cells to run; each has a chance of 1 in `one_in`, or more.

    Neighbours in length are put into blocks of so many, and one of each block is drawn. So a draw takes never more
    minutes than its share of all together and the longest cell.
    """
    # A generator of its own for each block: what is drawn from one does not depend on how many others there are.
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
