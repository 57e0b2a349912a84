"""The recipe of a command, with everything that is known to be wrong with it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppoctl import units
from ppoctl.activity import ACTIVITIES, Activity
from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.loading.load import Loaded
    from ppoctl.loading.problems import Problem
    from ppoctl.preflight.check import OriginOf
    from ppoctl.recipe.schema import Recipe
    from ppoctl.store.run_paths import RunPaths


def examined(
    files: Sequence[Path], sets: Sequence[str], *, strict: bool, device: str | None = None
) -> "tuple[Loaded, list[str]]":
    """The recipe, and notes on what it names. Raises all problems of both as one error; unless `strict`, something
    only missing on this machine is a note. `device`: what the generator will compute on."""
    from ppoctl.loading.load import examine
    from ppoctl.loading.problems import as_error
    from ppoctl.loading.rules.across_tables import violations
    from ppoctl.preflight.check import Findings, check

    notes: list[str] = []
    act = Activity("")

    def counted(name: str, rows: int) -> None:
        act.what = f"reading `data.{name}`: {rows:,} rows"
        render.passing(act.what)

    def assets(recipe: "Recipe", place: "OriginOf") -> "list[Problem]":
        found = check(recipe, place, device=device, counted=counted)
        notes.extend(found.notes)
        return found.problems

    try:
        with ACTIVITIES.track("checking the recipe, the model and the data") as act:
            loaded, problems = examine(files, sets, judges=(violations, assets))
    finally:
        render.passing()
    notes += () if loaded is None else loaded.notes
    wrong, said = Findings(problems, notes).judged(strict=strict)
    for note in said:
        render.print_stderr(f"note: {note}")
    if wrong or loaded is None:
        raise as_error(wrong or problems)
    return loaded, said


def startable(files: Sequence[Path], sets: Sequence[str], runs: Path, *, force: bool) -> "Loaded":
    """The recipe that `train` and `rollout` start with: nothing is known that would stop it. With `force` memory and
    disk may be judged too small."""
    from ppoctl.store.folders import require_writable

    require_writable(runs)  # before rows are read, which may take minutes
    from ppoctl.loading.capabilities import require_capable

    loaded, _ = examined(files, sets, strict=True)
    require_capable(loaded.recipe)
    require_disk_space(loaded.recipe, runs / loaded.recipe.name, force=force)
    return loaded


def submittable(files: Sequence[Path], sets: Sequence[str], runs: Path, *, force: bool) -> "Loaded":
    """The recipe of a job. What its nodes have is not known here: folders and disk are asked, memory and GPUs are
    not."""
    from ppoctl.store.folders import require_writable

    require_writable(runs)
    from ppoctl.loading.capabilities import require_capable
    from ppoctl.preflight.space import require_space

    loaded, _ = examined(files, sets, strict=True)
    require_capable(loaded.recipe)
    run = runs / loaded.recipe.name
    require_writable(run)
    if not force:
        require_space(loaded.recipe, run)
    return loaded


def require_disk_space(recipe: "Recipe", run: Path, *, force: bool) -> None:
    """Raise StorageError where the run directory cannot be written or its disk is too small, EnvironmentProblemError
    where GPUs are closed to its processes, OutOfMemoryError where this machine is too small; with `force` sizes are
    not asked."""
    from ppoctl.preflight.fit import require_fit
    from ppoctl.preflight.gpus import require_gpus
    from ppoctl.preflight.space import require_space
    from ppoctl.runs.available_memory import memory_of
    from ppoctl.store.folders import require_writable

    require_writable(run)
    require_gpus(recipe)
    if force:
        return
    require_space(recipe, run)
    require_fit(recipe, *memory_of(recipe))


def require_space_to_resume(paths: "RunPaths", sets: Sequence[str], *, force: bool) -> "Recipe":
    """The recipe that a run which is there goes on with. Raises as `require_same_run` and `require_room` do."""
    from ppoctl.runs.resume_checks import require_same_run
    from ppoctl.runs.run_recipe import recipe_of

    recipe = recipe_of(paths, sets)
    require_same_run(paths, recipe)
    require_disk_space(recipe, paths.root, force=force)
    return recipe


class Reading:
    """Progress of a digest: told in a terminal always, elsewhere every few seconds."""

    EVERY_S = 4.0

    def __init__(self) -> None:
        self._said = time.monotonic()

    def notify(self, path: Path, done: int, total: int) -> None:
        text = f"digest of {path.name}: {units.size(done)} of {units.size(total)}"
        render.passing(text)
        if not render.on_terminal() and time.monotonic() - self._said > self.EVERY_S:
            self._said = time.monotonic()
            render.print_stderr(text)
