"""`ppoctl validate`: report all errors of a recipe in one pass, without loading a model."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppoctl.cli import render, submission
from ppoctl.cli.findings import print_findings
from ppoctl.cli.options import Assets, GpuGib, Here, JsonOption, Recipes, Sets
from ppoctl.core import units

if TYPE_CHECKING:
    from ppoctl.recipe.loading.load import Loaded
    from ppoctl.recipe.schema import Recipe
    from ppoctl.run.loss_trial import LossTrial
    from ppoctl.run.reward_trial import Report
    from ppoctl.run.staging import Asset


def tried_reward(recipe: "Recipe", rows: int) -> "list[Report]":
    """Try the reward on `rows` training rows, and return a report for each scorer."""
    from ppoctl.run.reward_trial import try_reward

    render.passing(f"trying the reward on {rows} rows")
    try:
        return try_reward(recipe, rows)
    finally:
        render.passing()


def tried_loss(recipe: "Recipe") -> "list[LossTrial]":
    """Try the loss, and the estimator if it is a function of the user."""
    from ppoctl.run.loss_trial import try_functions

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
        from ppoctl.run.reward_trial import require_worth_training_on

        require_worth_training_on(reports)
    if losses:
        from ppoctl.run.loss_trial import require_right

        require_right(losses)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def validate(
    files: Recipes,
    sets: Sets = None,
    show: Annotated[bool, typer.Option("--show", help="Print the value of every key, and where it was set.")] = False,
    reward: Annotated[
        bool, typer.Option("--reward", help="Test the reward: gold answers must score higher than trivial responses.")
    ] = False,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Training rows for --reward.")] = 64,
    loss: Annotated[
        bool, typer.Option("--loss", help="Test the loss, and an estimator of your own, on random responses.")
    ] = False,
    assets: Assets = False,
    gpu_gib: GpuGib = None,
    here: Here = False,
    stage: Annotated[
        bool,
        typer.Option("--stage", help="Fetch or check assets that compute nodes cannot fetch, and list the assets."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a recipe, and report all errors at once. Checks keys, values, rules between tables and every row of the
    data, and whether ppoctl can train the model."""
    from ppoctl.run.startable import examined

    if stage:
        _fetch(files, sets or ())
    strict, device = assets or stage, None if gpu_gib is None else "gpu"
    loaded, findings = examined(
        files, sets or (), render.messages(), strict=strict, files_are_required=True, device=device
    )
    staged = _staged(loaded) if stage else None
    if here or gpu_gib is not None:
        _require_memory(loaded, gpu_gib)
    reports = tried_reward(loaded.recipe, rows) if reward else []
    losses = tried_loss(loaded.recipe) if loss else []
    if json:
        answer: dict[str, Any] = {
            "ok": are_right([*reports, *losses]),
            "name": loaded.recipe.name,
            "files": [str(file) for file in files],
            "findings": [finding.as_json() for finding in findings],
        }
        if show:
            answer |= {"recipe": loaded.resolved(), "origins": loaded.origins}
        if reward:
            answer["reward"] = [report.as_json() for report in reports]
        if loss:
            answer["loss"] = [trial.as_json() for trial in losses]
        if staged is not None:
            answer["assets"] = [asdict(asset) for asset in staged]
        render.json(answer)
    else:
        if show:
            _show(loaded)
        print_reports(reports)
        print_losses(losses)
        _print_assets(staged or ())
    require_right(reports, losses)
    if not json:
        render.print_stderr(f"ok: {' + '.join(str(file) for file in files)}")


def _require_memory(loaded: "Loaded", gpu_gib: float | None) -> None:
    """Raise OutOfMemoryError if a run does not fit on GPUs with this memory; None: those of this machine."""
    from ppoctl.core.finding import require_none
    from ppoctl.start.preflight import resource_checks

    require_none([resource_checks.memory(loaded.recipe, gpu_gib or resource_checks.gpu_gib_here())])


def _print_assets(staged: "Sequence[Asset]") -> None:
    sizes = ["" if asset.size is None else units.size(asset.size) for asset in staged]
    lines = [(asset.key, asset.where, size, asset.sha256[:12]) for asset, size in zip(staged, sizes, strict=True)]
    if lines:
        render.table(lines, ("asset", "where", "size", "sha256"))


def _fetch(files: Sequence[Path], sets: Sequence[str]) -> None:
    """Fetch the model and the data of the recipe that are not on this machine. Recipe errors are reported later."""
    from ppoctl.recipe.loading.load import examine
    from ppoctl.recipe.loading.rules.all_rules import violations
    from ppoctl.run import staging

    loaded, _ = examine(files, sets, judges=(violations,))
    if loaded is not None:
        staging.fetch(loaded.recipe, render.print_stderr)


def _staged(loaded: "Loaded") -> "list[Asset]":
    """Return the assets that a job requires. Raises one error that lists all problems, including missing assets."""
    from ppoctl.core.finding import require_none
    from ppoctl.run import staging

    require_none(staging.faults(loaded))
    staged = list(staging.assets(loaded.recipe, submission.Reading().notify))
    render.passing()
    return staged


def _show(loaded: "Loaded") -> None:
    from ppoctl.core.key_path import dotted
    from ppoctl.recipe import schema_tree as tree
    from ppoctl.recipe.loading.explain import shown

    rows = []
    for value in tree.values(loaded.recipe):
        key, effect = dotted(value.path), value.key.effect
        rows.append((key, shown(value.shown), loaded.origins[key], effect.value if effect else ""))
    render.table(rows, ("key", "value", "set by", "changes"))
