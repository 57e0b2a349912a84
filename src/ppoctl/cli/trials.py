"""The output of `ppoctl validate --reward` and `--loss`: what was tried, and the findings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppoctl.cli import render
from ppoctl.cli.findings import print_findings

if TYPE_CHECKING:
    from ppoctl.recipe.schema import Recipe
    from ppoctl.runs.loss_trial import LossTrial
    from ppoctl.runs.reward_trial import Report


def tried_reward(recipe: "Recipe", rows: int) -> "list[Report]":
    """Try the reward on `rows` training rows, and return a report for each scorer."""
    from ppoctl.runs.reward_trial import try_reward

    render.passing(f"trying the reward on {rows} rows")
    try:
        return try_reward(recipe, rows)
    finally:
        render.passing()


def tried_loss(recipe: "Recipe") -> "list[LossTrial]":
    """Try the loss, and the estimator if it is a function of the user."""
    from ppoctl.runs.loss_trial import try_functions

    render.passing("trying the loss on random responses")
    try:
        return try_functions(recipe)
    finally:
        render.passing()


def print_reports(reports: "Sequence[Report]") -> None:
    """Print each report: one line for each kind of response, then the findings and the scoring time."""
    for report in reports:
        render.heading(
            f"{report.scorer}: {report.rows} rows, {sum(line.rows for line in report.responses)} responses"
        )
        if report.responses:
            has_gold = any(line.as_gold is not None for line in report.responses)
            rows = [
                (
                    line.response,
                    "-" if line.mean is None else f"{line.mean:.3f}",
                    *(["" if line.as_gold is None else f"{line.as_gold:.0%}"] if has_gold else []),
                    line.missing or "",
                    _seconds(line.slowest_s),
                )
                for line in report.responses
            ]
            render.table(rows, ("response", "score", *(["as gold"] if has_gold else []), "no score", "slowest"))
        render.line()
        print_findings(report.findings, with_where=False)
        took = ", ".join(f"{name} {_seconds(report.seconds[name])}" for name in ("p50", "p99", "max"))
        render.line(f"scoring time per response: {took}; per step: about {_seconds(report.seconds['step'])}")
        render.line()


def print_losses(losses: "Sequence[LossTrial]") -> None:
    """Print each trial: what was tried, and one line for each finding."""
    for trial in losses:
        render.heading(f"{trial.key} ({trial.name}): {trial.inputs}")
        print_findings(trial.findings, with_where=False)
        render.line()


def are_right(trials: "Sequence[Report | LossTrial]") -> bool:
    """Whether no finding has the level `error`."""
    return not any(finding.is_error for trial in trials for finding in trial.findings)


def require_right(reports: "Sequence[Report]", losses: "Sequence[LossTrial]") -> None:
    """Raise RewardError or RecipeError if a finding has the level `error`."""
    if reports:
        from ppoctl.runs.reward_trial import require_worth_training_on

        require_worth_training_on(reports)
    if losses:
        from ppoctl.runs.loss_trial import require_right

        require_right(losses)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
