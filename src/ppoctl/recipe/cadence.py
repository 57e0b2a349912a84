"""Steps after which a run evaluates and saves."""

from ppoctl.recipe.schema import EvalTable, Recipe


def evaluates(recipe: Recipe, step: int) -> bool:
    """Whether the run evaluates after this step; step 0 is before the first update."""
    if not recipe.data.eval:
        return False
    table = recipe.eval
    if step == 0:
        return table.at_start
    return (table.at_end and step == recipe.steps) or _is_regular(table, step)


def _is_regular(table: EvalTable, step: int) -> bool:
    """Whether an evaluation between the start and the end of the run follows this step."""
    first = table.first_step or table.every_steps
    return table.every_steps > 0 and step >= first and (step - first) % table.every_steps == 0


def saves(recipe: Recipe, step: int) -> bool:
    """Whether the run saves the states of its roles after this step."""
    return step % recipe.checkpoint.every_steps == 0 or step == recipe.steps
