"""`ppoctl validate`: report all errors of a recipe in one pass, without loading a model."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppoctl import units
from ppoctl.cli import render, submission, trials
from ppoctl.cli.options import Assets, GpuGib, Here, JsonOption, Recipes, Sets

if TYPE_CHECKING:
    from ppoctl.loading.load import Loaded
    from ppoctl.runs.staging import Asset


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
    from ppoctl.runs.startable import examined

    if stage:
        _fetch(files, sets or ())
    strict, device = assets or stage, None if gpu_gib is None else "gpu"
    loaded, findings = examined(
        files, sets or (), render.messages(), strict=strict, files_are_required=True, device=device
    )
    staged = _staged(loaded) if stage else None
    if here or gpu_gib is not None:
        _require_memory(loaded, gpu_gib)
    reports = trials.tried_reward(loaded.recipe, rows) if reward else []
    losses = trials.tried_loss(loaded.recipe) if loss else []
    if json:
        answer: dict[str, Any] = {
            "ok": trials.are_right([*reports, *losses]),
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
        trials.print_reports(reports)
        trials.print_losses(losses)
        _print_assets(staged or ())
    trials.require_right(reports, losses)
    if not json:
        render.print_stderr(f"ok: {' + '.join(str(file) for file in files)}")


def _require_memory(loaded: "Loaded", gpu_gib: float | None) -> None:
    """Raise OutOfMemoryError if a run does not fit on GPUs with this memory; None: those of this machine."""
    from ppoctl.finding import require_none
    from ppoctl.preflight import resources

    require_none([resources.memory(loaded.recipe, gpu_gib or resources.gpu_gib_here())])


def _print_assets(staged: "Sequence[Asset]") -> None:
    sizes = ["" if asset.size is None else units.size(asset.size) for asset in staged]
    lines = [(asset.key, asset.where, size, asset.sha256[:12]) for asset, size in zip(staged, sizes, strict=True)]
    if lines:
        render.table(lines, ("asset", "where", "size", "sha256"))


def _fetch(files: Sequence[Path], sets: Sequence[str]) -> None:
    """Fetch the model and the data of the recipe that are not on this machine. Recipe errors are reported later."""
    from ppoctl.loading.load import examine
    from ppoctl.loading.rules.across_tables import violations
    from ppoctl.runs import staging

    loaded, _ = examine(files, sets, judges=(violations,))
    if loaded is not None:
        staging.fetch(loaded.recipe, render.print_stderr)


def _staged(loaded: "Loaded") -> "list[Asset]":
    """Return the assets that a job requires. Raises one error that lists all problems, including missing assets."""
    from ppoctl.finding import require_none
    from ppoctl.runs import staging

    require_none(staging.faults(loaded))
    staged = list(staging.assets(loaded.recipe, submission.Reading().notify))
    render.passing()
    return staged


def _show(loaded: "Loaded") -> None:
    from ppoctl.loading.explain import shown
    from ppoctl.recipe import schema_tree as tree
    from ppoctl.recipe.origins import dotted

    rows = []
    for value in tree.values(loaded.recipe):
        key, effect = dotted(value.path), value.key.effect
        rows.append((key, shown(value.shown), loaded.origins[key], effect.value if effect else ""))
    render.table(rows, ("key", "value", "set by", "changes"))
