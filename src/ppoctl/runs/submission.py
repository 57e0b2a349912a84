"""A run handed to a cluster: its directory is made here and now, so that a job that starts days later reads what was
submitted. Light: nothing of what trains is loaded."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ppoctl.batch.digest_cache import OnDigestProgress, kept_digest
from ppoctl.data.index import digests_of
from ppoctl.errors import RecipeError, SlurmError, quoted
from ppoctl.loading.as_written import paths_as_written
from ppoctl.loading.explain import as_toml
from ppoctl.loading.layers import path_of
from ppoctl.loading.load import Loaded
from ppoctl.loading.problems import as_error
from ppoctl.recipe.schema import Recipe
from ppoctl.runs.new_run import create, make_way
from ppoctl.runs.staging import job_faults
from ppoctl.slurm.allocation import allocation
from ppoctl.slurm.client import Slurm, SlurmAwayError
from ppoctl.slurm.request import Request, request_of, require_request
from ppoctl.slurm.run_status import require_idle
from ppoctl.slurm.script import Work, batch_script
from ppoctl.store import run_dir
from ppoctl.store.artifact import write_atomically
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.run_paths import RunPaths
from ppoctl.wire.sources import model_digests

LOG = "logs/slurm-%j.log"
"""Slurm's own output of a job, in the run directory."""


@dataclass(frozen=True)
class Submitted:
    """What was handed to the cluster."""

    ids: tuple[str, ...]
    """Ids of the jobs; each after the first waits for the one before it."""
    request: Request
    folder: Path
    log: str


def require_accepted(loaded: Loaded, *, force: bool) -> None:
    """Raise RecipeError where the cluster can never give what the recipe asks for, which is not asked with `force`,
    SlurmError where there is none, EnvironmentProblemError where a job could not begin."""
    slurm = outside()
    if not force:
        require_request(loaded, slurm)
    if problems := job_faults(loaded):
        raise as_error(problems)


def script_of(recipe: Recipe, work: Work) -> str:
    """The script as it is submitted."""
    return batch_script(recipe, request_of(recipe), work, program())


def program() -> list[str]:
    """The words that call this very installation."""
    beside = Path(sys.executable).with_name("ppoctl")
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "ppoctl"]


def work_of_run(paths: RunPaths, options: Sequence[str] = ()) -> Work:
    """What a job does with a run: it goes on from what is there."""
    return Work(("resume", str(paths.root), *options, "--on", "here"), paths.root, LOG, is_run=True)


def as_options(loaded: Loaded, sets: Sequence[str]) -> list[str]:
    """Options that set these keys in a job: what was typed here is read in another folder and environment there."""
    resolved, found = loaded.resolved(), list[str]()
    for text in sets:
        key = text.partition("=")[0]
        value: Any = resolved
        for name in path_of(key):
            value = value.get(name) if isinstance(value, dict) else None
        found += ["--set", f"{key}={as_toml(value)}" if isinstance(value, str | dict) else text]
    return found


def submit_new(
    loaded: Loaded,
    paths: RunPaths,
    command: str,
    options: Sequence[str],
    *,
    links: int = 1,
    progress: OnDigestProgress | None = None,
) -> Submitted:
    """Make the directory of a new run, and submit it. Where Slurm refuses nothing is left. Raises RunExistsError,
    RecipeError, SlurmError, StorageError."""
    slurm, recipe = outside(), loaded.recipe
    make_way(paths)
    digests = {**model_digests(recipe, partial(kept_digest, progress=progress)), **digests_of(recipe.data)}
    create(paths, recipe, digests, command=command, on="slurm", known={"written": paths_as_written(loaded)})
    try:
        return _submit_run(slurm, recipe, paths, command, options, links)
    except SlurmAwayError:
        raise
    except SlurmError:
        run_dir.remove(paths)
        raise


def submit_again(
    paths: RunPaths, recipe: Recipe, command: str, options: Sequence[str], *, links: int = 1
) -> Submitted:
    """Submit a run that is there, with keys that change from now on. Raises RunAliveError while somebody is at
    work on it, or a job of it is not over."""
    slurm = outside()
    require_idle(paths)
    return _submit_run(slurm, recipe, paths, command, options, links)


def submit_other(recipe: Recipe, work: Work) -> Submitted:
    """Submit what works on no run. Raises SlurmError."""
    id = outside().submit(script_of(recipe, work), folder=work.folder)
    return Submitted((id,), request_of(recipe), work.folder, work.log)


def would_accept(recipe: Recipe, work: Work) -> str:
    """What Slurm says of the script without taking it. Raises SlurmError where it would refuse."""
    # Its folder need not be there: nothing runs.
    return outside().would_accept(script_of(recipe, work), folder=Path.cwd())


def outside() -> Slurm:
    """The cluster. Raises RecipeError inside a job, which submits nothing."""
    here = allocation()
    if here is not None:
        raise RecipeError(
            f"`--on slurm` inside job {here.id}: a job submits no job",
            hint="use the nodes that it has: --on here; where it is only the desktop that you type in: "
            "env -u SLURM_JOB_ID ppoctl ...",
        )
    return Slurm()


def _submit_run(
    slurm: Slurm, recipe: Recipe, paths: RunPaths, command: str, options: Sequence[str], links: int
) -> Submitted:
    work = work_of_run(paths, options)
    script, ids = script_of(recipe, work), list[str]()
    restarts = recipe.slurm.requeues if recipe.slurm.requeue else 0
    paths.jobs.mkdir(exist_ok=True)
    try:
        for _ in range(links):
            before = ids[-1] if ids else None
            # Whatever its end was: what was written down of it says whether there is work left (`slurm.turn`).
            dependency = [] if before is None else [f"--dependency=afterany:{before}"]
            ids.append(slurm.submit(script, folder=paths.root, options=dependency))
            write_atomically(paths.job_script(ids[-1]), script.encode("utf-8"))
            record(paths, JobRecord(ids[-1], time.time(), command, before, restarts))
    except SlurmAwayError as error:
        raise _unknown(error, recipe, paths) from error
    except BaseException as error:
        if not _taken_back(slurm, ids):
            raise _unknown(error, recipe, paths) from error
        raise
    return Submitted(tuple(ids), request_of(recipe), paths.root, work.log)


def _taken_back(slurm: Slurm, ids: Sequence[str]) -> bool:
    """Whether none of these jobs is left, as far as Slurm says."""
    try:
        for id in ids:
            slurm.cancel(id)
    except SlurmError:
        return False
    return True


def _unknown(error: BaseException, recipe: Recipe, paths: RunPaths) -> SlurmAwayError:
    """The error where a job may be in the queue that nobody wrote down: its run stays where it is."""
    return SlurmAwayError(
        f"whether Slurm took a job for `{paths.root}` is not known: {error}",
        hint=f"squeue --me --name={quoted(recipe.name)}; if there is none: ppoctl resume {quoted(paths.root)} "
        "--on slurm",
    )
