"""`ppoctl rm`: delete runs and their MLflow runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.listing import BROKEN, Listed, listed
from ppoctl.cli.options import JsonOption, SeveralRuns, Wait, is_run, open_run
from ppoctl.core import units
from ppoctl.core.errors import PpoctlError, RecipeError, RunAliveError, StorageError, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppoctl.recipe.tracking_table import MlflowTracking


def rm(
    runs: SeveralRuns,
    yes: Annotated[
        bool, typer.Option("-y", "--yes", help="Delete without asking. Required if there is no terminal.")
    ] = False,
    keep_tracking: Annotated[
        bool, typer.Option("--keep-tracking", help="Delete only the run directory; keep its MLflow run.")
    ] = False,
    wait: Wait = None,
    json: JsonOption = False,
) -> None:
    """Delete runs and their MLflow runs. MLflow keeps deleted runs hidden until `mlflow gc`. If a run is running or
    in the queue, none is deleted."""
    rows = _deletable(runs, wait)
    settings = [None if keep_tracking else _tracking(row.run) for row in rows]
    if not yes and not _confirmed(rows, in_mlflow=any(settings)):
        render.print_stderr("nothing was deleted")
        return
    from ppoctl.show.tracking.mirror import kept_by_mlflow

    # All MLflow runs are looked up first: if MLflow does not answer, nothing is deleted.
    tracked = [
        None if setting is None else kept_by_mlflow(row.run, setting)
        for row, setting in zip(rows, settings, strict=True)
    ]
    deleted = []
    for row, kept in zip(rows, tracked, strict=True):
        # MLflow runs are deleted first: MLflow can restore them, and the folder identifies them. If the command is
        # killed in between, the user can repeat it to delete the rest.
        ids = [] if kept is None else kept.delete()
        _remove(row.run)
        deleted.append({"run": str(row.run), "bytes": row.bytes, "mlflow": ids})
        if not json:
            and_mlflow = f", and MLflow run {', '.join(ids)}" if ids else ""
            render.line(f"deleted {row.run} ({units.size(row.bytes)}){and_mlflow}")
    if json:
        render.json({"deleted": deleted})


def _deletable(runs: "Sequence[Path]", wait_s: float | None) -> list[Listed]:
    """Return a row for each run, without duplicates.

    Raises RecipeError if a folder is not a run, RunAliveError if a run may be running, and StorageError if the parent
    folder of a run is not writable.
    """
    from ppoctl.store.writable_folders import require_writable

    known = {run.resolve(): run for run in reversed(runs)}
    for root, run in known.items():
        if not is_run(run):
            open_run(run)
        require_writable(root.parent)
    rows, _ = listed(reversed(known.values()), wait_s)
    for row in rows:
        _require_idle(row)
    return rows


def _require_idle(row: Listed) -> None:
    from ppoctl.start.slurm import run_status
    from ppoctl.start.slurm.run_state import AT_WORK, WAITING
    from ppoctl.store.run_paths import RunPaths

    stop = f"ppoctl stop {quoted(row.run)}"
    if row.state in {*AT_WORK, *WAITING}:
        raise RunAliveError(f"run `{row.run}` is {row.state}: {row.says}", hint=stop)
    if row.may_be_at_work:
        raise RunAliveError(f"run `{row.run}` may be running: {row.says}", hint=stop)
    if row.state == BROKEN:
        try:
            run_status.require_idle(RunPaths(row.run))
        except RunAliveError as error:
            raise RunAliveError(error.message, hint=stop) from error


def _tracking(run: Path) -> "MlflowTracking | None":
    """Return the MLflow settings of a run; None if it is not tracked. Raises StorageError if they cannot be read."""
    from ppoctl.recipe.loading.load import from_resolved
    from ppoctl.recipe.tracking_table import MlflowTracking

    try:
        tracking = from_resolved(open_run(run).recipe).tracking
    except PpoctlError as error:
        raise StorageError(
            f"the MLflow settings of run `{run}` cannot be read: {error.message}",
            hint=f"delete only the directory: ppoctl rm {quoted(run)} --keep-tracking",
        ) from error
    return tracking if isinstance(tracking, MlflowTracking) else None


def _confirmed(rows: "Sequence[Listed]", *, in_mlflow: bool) -> bool:
    if not (sys.stdin.isatty() and render.on_terminal()):
        again = ["ppoctl rm", *(quoted(row.run) for row in rows), "--yes"]
        raise RecipeError("`ppoctl rm` must ask before it deletes, and there is no terminal", hint=" ".join(again))
    for row in rows:
        steps = "" if row.steps_planned is None else f", {row.steps_done} of {row.steps_planned} steps"
        evaluation = f", last evaluation {row.evaluated}" if row.evaluation else ""
        render.print_stderr(f"{row.run}: {row.state}, {units.size(row.bytes)}{steps}{evaluation}")
    what = "it" if len(rows) == 1 else f"all {len(rows)}"
    mlflow = " and its MLflow run" if in_mlflow else ""
    return render.agreed(
        f"delete {what}{mlflow.replace('its MLflow run', 'their MLflow runs') if len(rows) > 1 else mlflow}?"
    )


def _remove(run: Path) -> None:
    from ppoctl.store import run_dir
    from ppoctl.store.run_paths import RunPaths

    left = run_dir.remove(RunPaths(run.resolve()))
    if run.is_symlink():
        run.unlink()
    if left is not None:
        raise StorageError(
            f"run `{run}` is deleted, except for files that are left in `{left}`", hint=f"rm -r {quoted(left)}"
        )
