"""The recipe of a command, after all checks that the command requires: keys and rules, model and data, the user's
own functions, disk, memory and GPUs. It is called before anything is created, and imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppoctl.core.activity import ACTIVITIES, Activity
from ppoctl.core.errors import RewardError, as_typed
from ppoctl.core.finding import Finding, as_error, notes, require_none, without_missing
from ppoctl.recipe.loading.capabilities import require_capable
from ppoctl.recipe.loading.load import Loaded, examine
from ppoctl.recipe.loading.rules.all_rules import violations
from ppoctl.recipe.parallel import is_one_process
from ppoctl.recipe.schema import Recipe
from ppoctl.run.changed_settings import require_same_run
from ppoctl.run.run_recipe import loaded_of
from ppoctl.start.preflight import resource_checks
from ppoctl.start.preflight.check import OriginOf, check
from ppoctl.start.preflight.resource_checks import gpu_gib_here
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.writable_folders import require_writable


def memory_of(recipe: Recipe) -> tuple[float | None, int | None]:
    """Return the memory in GiB of the smallest GPU that the recipe may run on, and the host memory in bytes of all
    Ray nodes.

    The first value is None without a GPU; the second is None if the recipe does not join a Ray cluster. Raises
    EnvironmentProblemError if the Ray cluster does not answer.
    """
    address = recipe.cluster.ray_address
    if address is None or is_one_process(recipe):
        return gpu_gib_here(), None
    from ppoctl.engines.ray.node_memory import memory_of_nodes

    memory = memory_of_nodes(address, gpu_gib_here)
    return memory.gpu_gib, memory.host_bytes


@dataclass(frozen=True)
class Messages:
    """Functions with which the checks report to the user."""

    line: Callable[[str], None]
    """Prints a note or a warning."""
    passing: Callable[[str], None] = lambda _: None
    """Shows what is being checked, until the next call; an empty text removes it."""


def examined(
    files: Sequence[Path],
    sets: Sequence[str],
    messages: Messages,
    *,
    strict: bool,
    files_are_required: bool = False,
    device: str | None = None,
) -> tuple[Loaded, list[Finding]]:
    """Return the recipe, and the findings on it, its model and its data.

    Raises one error that lists all problems. Unless `strict` is True, an asset that is missing only on this machine
    is a note and not a problem; with `files_are_required`, this does not hold for files of the user. `device` is the
    device of the generator (vLLM): `cpu` or `gpu`.
    """
    activity = Activity("")

    def counted(name: str, rows: int) -> None:
        activity.what = f"reading `data.{name}`: {rows:,} rows"
        messages.passing(activity.what)

    def assets(recipe: Recipe, place: OriginOf) -> list[Finding]:
        return check(recipe, place, device=device, counted=counted)

    try:
        with ACTIVITIES.track("checking the recipe, the model and the data") as activity:
            loaded, found = examine(files, sets, judges=(violations, assets))
    finally:
        messages.passing("")
    # With `epochs`, a missing file of rows is an error of every command: the rows of an epoch cannot be counted.
    files_are_required = files_are_required or loaded is None
    findings = found if strict else without_missing(found, files_are_required=files_are_required)
    if loaded is None and not any(finding.is_error for finding in findings):
        raise as_error(found)
    _print(findings, messages)
    require_none(findings)
    assert loaded is not None
    return loaded, findings


def startable(files: Sequence[Path], sets: Sequence[str], runs: Path, messages: Messages, *, force: bool) -> Loaded:
    """Return a recipe that has passed all checks, for `train` and `rollout`.

    Raises one error that lists all problems. With `force`, memory and disk are not checked.
    """
    loaded = _capable(files, sets, runs, messages)
    require_resources(loaded.recipe, runs / loaded.recipe.name, force=force)
    _require_usable_functions(loaded.recipe, as_typed("validate", files, sets), messages)
    return replace(loaded, forced=force)


def submittable(files: Sequence[Path], sets: Sequence[str], runs: Path, messages: Messages, *, force: bool) -> Loaded:
    """Return a recipe that has passed the checks for a Slurm job: those of `startable`, except memory and GPUs. This
    machine does not know the nodes of the job."""
    loaded = _capable(files, sets, runs, messages)
    _require_disk(loaded.recipe, runs / loaded.recipe.name, force=force)
    return replace(loaded, forced=force)


def resumable(run: RecordedRun, sets: Sequence[str], messages: Messages, *, force: bool) -> Recipe:
    """Return the recipe that an existing run continues with, and print the notes on its keys.

    Raises the errors of `require_same_run` and `require_resources`. A run that was started with `--force` continues
    with it.
    """
    loaded = loaded_of(run, sets)
    _print(violations(loaded.recipe, loaded.place), messages)
    require_same_run(run, loaded.recipe)
    require_resources(loaded.recipe, run.paths.root, force=force or "forced" in run.facts)
    return loaded.recipe


def require_resources(recipe: Recipe, run: Path, *, force: bool) -> None:
    """Check the run directory, the GPUs, free disk and memory; with `force`, only the directory and the GPUs.

    Raises StorageError if the directory is not writable or its disk has too little free space. Raises
    EnvironmentProblemError if the compute mode of a GPU excludes the processes of the run, and OutOfMemoryError if
    the memory is too small.
    """
    require_none(resource_checks.shared_gpus(recipe))
    _require_disk(recipe, run, force=force)
    if not force:
        require_none([resource_checks.memory(recipe, *memory_of(recipe))])


def _capable(files: Sequence[Path], sets: Sequence[str], runs: Path, messages: Messages) -> Loaded:
    require_writable(runs)  # before rows are read, which may take minutes
    loaded, _ = examined(files, sets, messages, strict=True)
    require_capable(loaded.recipe)
    return loaded


def _require_usable_functions(recipe: Recipe, validate: str, messages: Messages) -> None:
    """Raise the errors of `own_functions.require_usable`. `validate` is the command that checks the recipe."""
    from ppoctl.start.preflight.own_functions import require_usable

    messages.passing("trying the reward")
    try:
        require_usable(recipe)
    except RewardError as error:
        if recipe.eval.metrics is None or "eval.metrics" not in error.message:
            error.hint = f"{validate} --reward"
        raise
    finally:
        messages.passing("")


def _require_disk(recipe: Recipe, run: Path, *, force: bool) -> None:
    require_writable(run)
    if not force:
        require_none([resource_checks.disk(recipe, run)])


def _print(findings: Sequence[Finding], messages: Messages) -> None:
    for text in notes(findings):
        messages.line(text)
