"""Steps after which a run evaluates and saves."""

from ppoctl.algorithms.evaluation_table import EvalTable
from ppoctl.recipe.schema import Recipe


def evaluates(recipe: Recipe, step: int, *, ends_early: bool = False) -> bool:
    """Whether the run evaluates after this step; step 0 is before the first update. `ends_early`: whether the run
    ends after this step, before its last step."""
    if not recipe.data.eval:
        return False
    table = recipe.eval
    if step == 0:
        return table.at_start
    return (table.at_end and (ends_early or step == recipe.steps)) or _is_regular(table, step)


def _is_regular(table: EvalTable, step: int) -> bool:
    """Whether an evaluation between the start and the end of the run follows this step."""
    first = table.first_step or table.every_steps
    return table.every_steps > 0 and step >= first and (step - first) % table.every_steps == 0


def saves(recipe: Recipe, step: int, *, ends_early: bool = False) -> bool:
    """Whether the run saves the states of its roles after this step (see `evaluates`)."""
    return ends_early or step % recipe.checkpoint.every_steps == 0 or step == recipe.steps
