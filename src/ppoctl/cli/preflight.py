"""Loading and checking the recipe of a command."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ppoctl import units
from ppoctl.activity import ACTIVITIES, Activity
from ppoctl.cli import render
from ppoctl.cli.findings import print_notes
from ppoctl.cli.options import as_typed

if TYPE_CHECKING:
    from ppoctl.finding import Finding
    from ppoctl.loading.load import Loaded
    from ppoctl.preflight.check import OriginOf
    from ppoctl.recipe.schema import Recipe
    from ppoctl.store.run_paths import RunPaths


def examined(
    files: Sequence[Path],
    sets: Sequence[str],
    *,
    strict: bool,
    files_are_required: bool = False,
    device: str | None = None,
) -> "tuple[Loaded, list[Finding]]":
    """Return the recipe, and the findings on it, its model and its data.

    Raises one error that lists all problems. Unless `strict` is True, an asset that is missing only on this machine
    is a note and not a problem; with `files_are_required`, this does not hold for files of the user. `device` is the
    device of the generator (vLLM): `cpu` or `gpu`.
    """
    from ppoctl.finding import as_error, require_none, without_missing
    from ppoctl.loading.load import examine
    from ppoctl.loading.rules.across_tables import violations
    from ppoctl.preflight.check import check

    activity = Activity("")

    def counted(name: str, rows: int) -> None:
        activity.what = f"reading `data.{name}`: {rows:,} rows"
        render.passing(activity.what)

    def assets(recipe: "Recipe", place: "OriginOf") -> "list[Finding]":
        return check(recipe, place, device=device, counted=counted)

    try:
        with ACTIVITIES.track("checking the recipe, the model and the data") as activity:
            loaded, found = examine(files, sets, judges=(violations, assets))
    finally:
        render.passing()
    # With `epochs`, a missing file of rows is an error of every command: the rows of an epoch cannot be counted.
    files_are_required = files_are_required or loaded is None
    findings = found if strict else without_missing(found, files_are_required=files_are_required)
    if loaded is None and not any(finding.is_error for finding in findings):
        raise as_error(found)
    print_notes(findings)
    require_none(findings)
    assert loaded is not None
    return loaded, findings


def startable(files: Sequence[Path], sets: Sequence[str], runs: Path, *, force: bool) -> "Loaded":
    """Return a recipe that has passed all checks, for `train` and `rollout`.

    Raises one error that lists all problems. With `force`, memory and disk are not checked.
    """
    loaded = _capable(files, sets, runs)
    require_resources(loaded.recipe, runs / loaded.recipe.name, force=force)
    _require_usable_functions(loaded.recipe, as_typed("validate", files, sets))
    return replace(loaded, forced=force)


def _require_usable_functions(recipe: "Recipe", validate: str) -> None:
    """Raise the errors of `own_functions.require_usable`. `validate` is the command that checks the recipe."""
    from ppoctl.errors import RewardError
    from ppoctl.preflight.own_functions import require_usable

    render.passing("trying the reward")
    try:
        require_usable(recipe)
    except RewardError as error:
        if recipe.eval.metrics is None or "eval.metrics" not in error.message:
            error.hint = f"{validate} --reward"
        raise
    finally:
        render.passing()


def submittable(files: Sequence[Path], sets: Sequence[str], runs: Path, *, force: bool) -> "Loaded":
    """Return a recipe that has passed the checks for a Slurm job: those of `startable`, except memory and GPUs. This
    machine does not know the nodes of the job."""
    loaded = _capable(files, sets, runs)
    _require_disk(loaded.recipe, runs / loaded.recipe.name, force=force)
    return replace(loaded, forced=force)


def _capable(files: Sequence[Path], sets: Sequence[str], runs: Path) -> "Loaded":
    from ppoctl.loading.capabilities import require_capable
    from ppoctl.store.folders import require_writable

    require_writable(runs)  # before rows are read, which may take minutes
    loaded, _ = examined(files, sets, strict=True)
    require_capable(loaded.recipe)
    return loaded


def require_resources(recipe: "Recipe", run: Path, *, force: bool) -> None:
    """Check the run directory, the GPUs, free disk and memory; with `force`, only the directory and the GPUs.

    Raises StorageError if the directory is not writable or its disk has too little free space. Raises
    EnvironmentProblemError if the compute mode of a GPU excludes the processes of the run, and OutOfMemoryError if
    the memory is too small.
    """
    from ppoctl.finding import require_none
    from ppoctl.preflight import resources
    from ppoctl.runs.available_memory import memory_of

    require_none(resources.shared_gpus(recipe))
    _require_disk(recipe, run, force=force)
    if not force:
        require_none([resources.memory(recipe, *memory_of(recipe))])


def _require_disk(recipe: "Recipe", run: Path, *, force: bool) -> None:
    from ppoctl.finding import require_none
    from ppoctl.preflight.resources import disk
    from ppoctl.store.folders import require_writable

    require_writable(run)
    if not force:
        require_none([disk(recipe, run)])


def require_space_to_resume(paths: "RunPaths", sets: Sequence[str], *, force: bool) -> "Recipe":
    """Return the recipe that an existing run continues with, and print the notes on its keys.

    Raises the errors of `require_same_run` and `require_resources`. A run that was started with `--force` continues
    with it.
    """
    from ppoctl.loading.rules.across_tables import violations
    from ppoctl.runs.changed_settings import require_same_run
    from ppoctl.runs.run_recipe import loaded_of
    from ppoctl.store import run_dir

    loaded = loaded_of(paths, sets)
    print_notes(violations(loaded.recipe, loaded.place))
    require_same_run(paths, loaded.recipe)
    require_resources(loaded.recipe, paths.root, force=force or "forced" in run_dir.facts(paths))
    return loaded.recipe


class Reading:
    """Progress of computing a file's digest: shown continuously on a terminal, otherwise every few seconds."""

    EVERY_S = 4.0

    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def notify(self, path: Path, done: int, total: int) -> None:
        text = f"digest of {path.name}: {units.size(done)} of {units.size(total)}"
        render.passing(text)
        if not render.on_terminal() and time.monotonic() - self._printed_at > self.EVERY_S:
            self._printed_at = time.monotonic()
            render.print_stderr(text)
