"""Submission of a run to Slurm. The run directory is created at submission, so that a job that starts days later
reads the submitted settings. This module does not import torch.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ppoctl.core.batch.digest_cache import OnDigestProgress, kept_digest
from ppoctl.core.errors import RecipeError, SlurmError, quoted
from ppoctl.core.finding import require_none
from ppoctl.data.index import digests_of
from ppoctl.recipe.loading.explain import as_toml
from ppoctl.recipe.loading.layers import path_of
from ppoctl.recipe.loading.load import Loaded
from ppoctl.recipe.schema import Recipe
from ppoctl.run.new_run import create, known_of, make_way
from ppoctl.run.staging import job_faults
from ppoctl.run.wire.sources import model_digests
from ppoctl.start.slurm.allocation import allocation
from ppoctl.start.slurm.request import request_findings
from ppoctl.start.slurm.run_status import require_idle
from ppoctl.start.slurm.script import Work, batch_script, described_nodes
from ppoctl.start.slurm.slurm_client import Slurm, SlurmAwayError
from ppoctl.store import run_dir
from ppoctl.store.artifact import write_atomically
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.run_paths import RunPaths

LOG = "logs/slurm-%j.log"
"""Slurm's log of a job, in the run directory."""


@dataclass(frozen=True)
class Submitted:
    """Result of a submission."""

    ids: tuple[str, ...]
    """Ids of the jobs; each job after the first waits for the previous one."""
    nodes: str
    """The requested nodes in words."""
    folder: Path
    log: str


def require_accepted(loaded: Loaded, work: Work, *, force: bool) -> None:
    """Raise an error if the recipe cannot run as a job.

    RecipeError: the cluster can never provide what the recipe requests (not checked with `force`). SlurmError: Slurm
    is not available, or refuses the job for another reason. EnvironmentProblemError: a job could not start.
    """
    slurm = outside()
    if not force:
        require_none(request_findings(loaded, slurm, partial(script_of, work=work)))
    require_none(job_faults(loaded))


def script_of(recipe: Recipe, work: Work) -> str:
    """Return the batch script that is submitted."""
    return batch_script(recipe, work, program())


def program() -> list[str]:
    """Return the command that runs this installation of ppoctl."""
    script = Path(sys.executable).with_name("ppoctl")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "ppoctl"]


def work_of_run(paths: RunPaths, options: Sequence[str] = ()) -> Work:
    """Return the command of a job for a run, which resumes the run."""
    return Work(("resume", str(paths.root), *options, "--on", "here"), paths.root, LOG, is_run=True)


def as_options(loaded: Loaded, sets: Sequence[str]) -> list[str]:
    """Return options that set these keys in a job. The job reads the options in another folder and environment than
    this command line."""
    resolved, options = loaded.resolved(), list[str]()
    for text in sets:
        key = text.partition("=")[0]
        value: Any = resolved
        for name in path_of(key):
            value = value.get(name) if isinstance(value, dict) else None
        options += ["--set", f"{key}={as_toml(value)}" if isinstance(value, str | dict) else text]
    return options


def submit_new(
    loaded: Loaded,
    paths: RunPaths,
    command: str,
    options: Sequence[str],
    *,
    links: int = 1,
    progress: OnDigestProgress | None = None,
) -> Submitted:
    """Create the directory of a new run and submit it. If Slurm rejects the job, the directory is removed.

    Raises RunExistsError, RecipeError, SlurmError, StorageError.
    """
    slurm, recipe = outside(), loaded.recipe
    make_way(paths)
    digests = {**model_digests(recipe, partial(kept_digest, progress=progress)), **digests_of(recipe.data)}
    create(paths, recipe, digests, command=command, on="slurm", known=known_of(loaded))
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
    """Submit an existing run; changed keys hold from now on. Raises RunAliveError while a process or a job is using
    the run."""
    slurm = outside()
    require_idle(paths)
    return _submit_run(slurm, recipe, paths, command, options, links)


def submit_other(recipe: Recipe, work: Work) -> Submitted:
    """Submit work that is not a run. Raises SlurmError."""
    id = outside().submit(script_of(recipe, work), folder=work.folder)
    return Submitted((id,), described_nodes(recipe), work.folder, work.log)


def would_accept(recipe: Recipe, work: Work) -> str:
    """Return Slurm's message about the script without submitting it. Raises SlurmError if Slurm would reject the
    script."""
    # The folder does not matter, because nothing runs.
    return outside().would_accept(script_of(recipe, work), folder=Path.cwd())


def outside() -> Slurm:
    """Return the Slurm client. Raises RecipeError inside a job, which must not submit jobs."""
    job = allocation()
    if job is not None:
        raise RecipeError(
            f"`--on slurm` inside job {job.id}: a job cannot submit jobs",
            hint="use its nodes: --on here; if the job is only your desktop session: env -u SLURM_JOB_ID ppoctl ...",
        )
    return Slurm()


def _submit_run(
    slurm: Slurm, recipe: Recipe, paths: RunPaths, command: str, options: Sequence[str], links: int
) -> Submitted:
    work = work_of_run(paths, options)
    script, ids = script_of(recipe, work), list[str]()
    restarts = recipe.slurm.requeues if recipe.slurm.requeue else 0
    # Before the submission: a job may start at once, and its script records its end in this folder.
    paths.jobs.mkdir(exist_ok=True)
    try:
        for _ in range(links):
            before = ids[-1] if ids else None
            # With afterany, the job starts no matter how the previous job ended, and reads from the run whether work
            # is left (`slurm.job_start`).
            dependency = [] if before is None else [f"--dependency=afterany:{before}"]
            ids.append(slurm.submit(script, folder=paths.root, options=dependency))
            write_atomically(paths.job_script(ids[-1]), script.encode("utf-8"))
            record(paths, JobRecord(ids[-1], time.time(), command, before, restarts))
    except SlurmAwayError as error:
        raise _unknown_submission(error, recipe, paths) from error
    # Also after Ctrl-C: a job without a record must not stay in the queue.
    except BaseException as error:
        if not _all_cancelled(slurm, ids):
            raise _unknown_submission(error, recipe, paths) from error
        raise
    return Submitted(tuple(ids), described_nodes(recipe), paths.root, work.log)


def _all_cancelled(slurm: Slurm, ids: Sequence[str]) -> bool:
    """Whether Slurm confirmed that all these jobs are cancelled."""
    try:
        for id in ids:
            slurm.cancel(id)
    except SlurmError:
        return False
    return True


def _unknown_submission(error: BaseException, recipe: Recipe, paths: RunPaths) -> SlurmAwayError:
    """Return the error for a job that may be queued but was not recorded. The run directory is kept."""
    return SlurmAwayError(
        f"it is unknown whether Slurm accepted a job for `{paths.root}`: {error}",
        hint=f"squeue --me --name={quoted(recipe.name)}; if it lists no job: ppoctl resume {quoted(paths.root)} "
        "--on slurm",
    )
