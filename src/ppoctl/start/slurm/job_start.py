"""Start of a Slurm job on a run: decide whether the job should work at all, before anything is loaded."""

import os
import time

from ppoctl.core.errors import FinishedShortError, InterruptedByUserError, quoted
from ppoctl.start.slurm.allocation import Allocation
from ppoctl.store.append import intact
from ppoctl.store.jobs import (
    JobRecord,
    ScriptEnd,
    Start,
    ends,
    jobs,
    last_end,
    record,
    resume_command,
    started,
    starts,
)
from ppoctl.store.liveness import attempts
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import stop_requested

OWN = "PPOCTL_JOB"
"""Environment variable that a run's batch script sets. Commands that a user types on a node do not have it."""
MAX_STARTS_WITHOUT_PROGRESS = 3
"""Largest number of consecutive starts of a job that commit nothing new; after that, the job does not start again."""

_SIGNALLED = range(134, 140)
"""Exit codes of a command that a signal killed; the reason is not known."""


def is_resumable(code: int) -> bool:
    """Return whether the next job should continue after a job that ended with this exit code.

    The result is True if the job was preempted, lost a process or a node, hung, or was killed. Any other code means
    that the run is done, or that a person must look at the error.
    """
    return code in (75, 3, 6) or code in _SIGNALLED


def register_start(paths: RunPaths, here: Allocation) -> int | None:
    """Record that this job starts to work on the run.

    Returns the exit code with which the job should end at once, because the previous job of its chain finished the
    run or failed; None: the job should work. Raises FinishedShortError if the last starts of this job committed
    nothing; InterruptedByUserError if a stop was requested before the job was requeued.
    """
    job = next((job for job in jobs(paths) if job.id == here.id), None)
    if job is None and os.environ.get(OWN) == here.id:  # the submitting command was killed before it recorded the job
        job = JobRecord(here.id, time.time(), "resume")
        record(paths, job)
    if job is None:  # the job's script was written by a user, not by ppoctl
        return None
    if (code := _done_before(paths, job)) is not None:
        return code
    _require_wanted(paths, here)
    progress = _progress(paths)
    _require_progress(paths, here, progress)
    now = time.time()
    limit_s = 0.0 if here.ends_at is None else here.ends_at - now
    started(paths, here.id, Start(here.restarts, progress, now, limit_s))
    return None


def _done_before(paths: RunPaths, job: JobRecord) -> int | None:
    if job.after is None:
        return None
    began = (start.restart for start in starts(paths, job.after))
    end = last_end(ends(paths, job.after), began)
    return None if end is None or is_resumable(end.code) else end.code


def _require_wanted(paths: RunPaths, here: Allocation) -> None:
    """Raise InterruptedByUserError if `ppoctl stop` was called on the job's previous attempt.

    A signal may have ended that attempt before it read the stop request.
    """
    newest = next(reversed(attempts(intact(paths.journal))), None)
    if newest is None or newest.get("job") != here.id or newest["status"] == "interrupted":
        return
    if stop_requested(paths, newest["attempt"]) is not None:
        raise InterruptedByUserError(
            f"`ppoctl stop` was called before job {here.id} was requeued; the job starts nothing",
            hint=resume_command(paths.root),
        )


def _require_progress(paths: RunPaths, here: Allocation, progress: int) -> None:
    """Raise FinishedShortError if the job's last starts ended by themselves and committed nothing new."""
    by_restart = {end.restart: end for end in ends(paths, here.id)}
    previous = [
        start
        for start in starts(paths, here.id)
        if start.restart in by_restart and _ended_by_itself(start, by_restart[start.restart])
    ][-MAX_STARTS_WITHOUT_PROGRESS:]
    if len(previous) == MAX_STARTS_WITHOUT_PROGRESS and all(start.progress == progress for start in previous):
        raise FinishedShortError(
            f"job {here.id} started {MAX_STARTS_WITHOUT_PROGRESS} times in a row and committed nothing new; "
            "it does not start again",
            hint=f"find the reason: ppoctl logs {quoted(paths.root)}; then: {resume_command(paths.root)}",
        )


def _ended_by_itself(start: Start, end: ScriptEnd) -> bool:
    """Return whether a start ended by itself or at its time limit, not by preemption.

    Slurm sends the same signal before the time limit and before a preemption, so the elapsed time decides.
    """
    was_long = start.limit_s > 0 and end.at - start.at > start.limit_s / 2
    return end.signal == "" or (end.signal == "USR1" and was_long)


def _progress(paths: RunPaths) -> int:
    """Return a number that grows with every committed stage and every file of finished samples."""
    stages = sum("stage" in line for line in intact(paths.journal))
    sample_files = [
        file for step in paths.committed_steps()[-2:] for folder in paths.all_parts(step) for file in folder.iterdir()
    ]
    # When a stage is committed, its files of samples are removed: the number must still grow.
    return 1_000_000 * stages + len(sample_files)
