"""The output of `ppoctl validate --loss`: checks of the loss, and of an estimator of the user."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppoctl.cli import render
from ppoctl.cli.findings import print_findings

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
    """Print each trial: what was tried, and one line for each finding."""
    for trial in trials:
        render.heading(f"{trial.key} ({trial.name}): {trial.inputs}")
        print_findings(trial.findings, with_where=False)
        render.line()


def is_right(trials: "Sequence[LossTrial]") -> bool:
    """Whether no finding has the level `error`."""
    return not any(finding.is_error for trial in trials for finding in trial.findings)


def require_right(trials: "Sequence[LossTrial]") -> None:
    """Raise RecipeError if a finding has the level `error`."""
    if trials:
        from ppoctl.runs.loss_trial import require_right

        require_right(trials)
