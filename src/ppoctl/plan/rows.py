"""Rows of each stage of a step: least, if every generated group is kept, and most, after the last possible round."""

from dataclasses import dataclass

from ppoctl.algorithm.trace import Trace
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.sizes import fewest_rounds, sequences_per_step
from ppoctl.store.outline import PREVIOUS


@dataclass(frozen=True)
class StageRows:
    """Rounds of a stage in one step, and the rows of its record, or of its inputs, in each round."""

    rounds: int
    rows: int

    @property
    def total(self) -> int:
        """Rows of all rounds."""
        return self.rounds * self.rows


def stage_rows(traced: Trace, recipe: Recipe, *, most: bool = True) -> dict[str, StageRows]:
    """Return stage -> its rows in one step: the most or, if `most` is false, the least."""
    found = {}
    for call in traced.calls:
        defining = call.rows.removesuffix(PREVIOUS)
        usual = sequences_per_step(recipe)
        bounds = traced[defining].row_bounds(recipe) if defining in traced else (usual, usual)
        rounds = call.entry.at_most if most else min(call.entry.at_most, fewest_rounds(recipe))
        found[call.stage.name] = StageRows(rounds, bounds[most])
    return found
