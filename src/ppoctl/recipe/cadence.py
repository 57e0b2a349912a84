"""After which steps a run evaluates and saves."""

from ppoctl.recipe.schema import Recipe


def evaluates(recipe: Recipe, step: int) -> bool:
    """Whether the run evaluates after this step; 0 is before the first."""
    if not recipe.data.eval:
        return False
    if step == 0:
        return recipe.eval.at_start
    return step == recipe.steps or (recipe.eval.every_steps > 0 and step % recipe.eval.every_steps == 0)


def saves(recipe: Recipe, step: int) -> bool:
    """Whether states are saved after this step."""
    return step % recipe.checkpoint.every_steps == 0 or step == recipe.steps
