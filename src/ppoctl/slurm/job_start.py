"""A job's turn on a run: whether it should work at all, asked before anything is loaded."""

import os
import time

from ppoctl.errors import FinishedShortError, InterruptedByUserError, quoted
from ppoctl.slurm.allocation import Allocation
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
"""Variable by which a run's batch script tells its command from one that a person typed on the nodes of some job."""
MAX_STARTS_WITHOUT_PROGRESS = 3
"""Starts of one job in a row after which nothing new was committed, and after which it is not tried again."""

_SIGNALLED = range(134, 140)
"""Exit codes of a command that was killed: nobody knows why."""


def is_resumable(code: int) -> bool:
    """Whether a job that ended with this code left work to whoever comes next: it was asked to stop, a process or a
    node was lost, it hung, or it was killed. Anything else is for a person to look at, or done."""
    return code in (75, 3, 6) or code in _SIGNALLED


def register_start(paths: RunPaths, here: Allocation) -> int | None:
    """Write down that this job starts to work on the run. Returns the exit code with which it should end at once,
    because the link before it in a chain is done or must be looked at; None: to work.

    Raises FinishedShortError where the last starts of this job committed nothing, InterruptedByUserError where the
    run was to stop before the job went back into the queue.
    """
    found = next((job for job in jobs(paths) if job.id == here.id), None)
    if found is None and os.environ.get(OWN) == here.id:  # whoever submitted it could not write it down
        found = JobRecord(here.id, time.time(), "resume")
        record(paths, found)
    if found is None:  # a script of the user's own
        return None
    if (code := _done_before(paths, found)) is not None:
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
    """A signal may have come before `ppoctl stop` was heard: what the attempt of before was asked still holds."""
    newest = next(reversed(attempts(intact(paths.journal))), None)
    if newest is None or newest.get("job") != here.id or newest["status"] == "interrupted":
        return
    if stop_requested(paths, newest["attempt"]) is not None:
        raise InterruptedByUserError(
            f"`ppoctl stop` was typed before job {here.id} went back into the queue; nothing was begun",
            hint=resume_command(paths.root),
        )


def _require_progress(paths: RunPaths, here: Allocation, progress: int) -> None:
    blamed = {end.restart: end for end in ends(paths, here.id)}
    before = [
        start
        for start in starts(paths, here.id)
        if start.restart in blamed and _is_its_own(start, blamed[start.restart])
    ][-MAX_STARTS_WITHOUT_PROGRESS:]
    if len(before) == MAX_STARTS_WITHOUT_PROGRESS and all(start.progress == progress for start in before):
        raise FinishedShortError(
            f"job {here.id} started {MAX_STARTS_WITHOUT_PROGRESS} times in a row and committed nothing new; it is not tried again",
            hint=f"see why: ppoctl logs {quoted(paths.root)}; then: {resume_command(paths.root)}",
        )


def _is_its_own(start: Start, end: ScriptEnd) -> bool:
    """Whether a start ended by itself or at its time limit, and was not pushed out: Slurm warns of both alike."""
    was_long = start.limit_s > 0 and end.at - start.at > start.limit_s / 2
    return end.signal == "" or (end.signal == "USR1" and was_long)


def _progress(paths: RunPaths) -> int:
    """A number that grows with everything that is committed or kept: stages, and finished samples of one that is at
    work."""
    stages = sum("stage" in line for line in intact(paths.journal))
    parts = [
        file for step in paths.committed_steps()[-2:] for folder in paths.all_parts(step) for file in folder.iterdir()
    ]
    return 1_000_000 * stages + len(parts)
