"""The output of `ppoctl validate --loss`: checks of the loss, and of an estimator of the user."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.recipe.schema import Recipe
    from ppoctl.runs.loss_trial import LossTrial


def tried(recipe: "Recipe") -> "list[LossTrial]":
    """Try the loss, and the estimator if it is a function of the user."""
    from ppoctl.runs.loss_trial import try_functions

    render.passing("trying the loss on random responses")
    try:
        return try_functions(recipe)
    finally:
        render.passing()


def print_trials(trials: "Sequence[LossTrial]") -> None:
    """Print each trial: what was tried, and one line for each check."""
    for trial in trials:
        render.heading(f"{trial.key} ({trial.name}): {trial.inputs}")
        render.table([(check.level, check.says) for check in trial.checks])
        render.line()


def is_right(trials: "Sequence[LossTrial]") -> bool:
    """Whether no check has the level `wrong`."""
    return all(check.level != "wrong" for trial in trials for check in trial.checks)


def require_right(trials: "Sequence[LossTrial]") -> None:
    """Raise RecipeError if a check has the level `wrong`."""
    if trials:
        from ppoctl.runs.loss_trial import require_right

        require_right(trials)
