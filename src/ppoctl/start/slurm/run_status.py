"""Present facts of runs, from their folders and from one query to Slurm about all of their jobs. Imports no torch."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ppoctl.core.errors import RunAliveError, SlurmError, quoted, without_secrets
from ppoctl.start.slurm.allocation import Allocation, allocation
from ppoctl.start.slurm.run_state import RunFacts, SlurmSnapshot
from ppoctl.start.slurm.slurm_client import Slurm, SlurmAbsentError, SlurmJob
from ppoctl.store import jobs as jobs_of
from ppoctl.store import liveness
from ppoctl.store.append import intact
from ppoctl.store.journal import JournalLine
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

ANSWER_S = 2.0
"""Seconds that Slurm has to answer a command that only reads; a busy controller may need more."""

TAIL_BYTES = 16384
"""Number of bytes at the end of a job's log that are searched for the last error."""


def facts(run: RecordedRun, lines: Sequence[JournalLine]) -> RunFacts:
    """Return the facts from a run's folder; `lines` are its journal, or the part of it that is intact.

    Raises StorageError if a file cannot be read.
    """
    paths, outlines, recipe = run.paths, run.outlines, run.recipe
    attempts = liveness.attempts(lines)
    jobs = jobs_of.jobs(paths)
    stages = [line for line in lines if "stage" in line]
    finished_steps = (line["step"] for line in stages if line["stage"] == outlines.at(line["step"]).last)
    start_limit_s, run_limit_s = _silence_limits(recipe, stages)
    return RunFacts(
        attempts=attempts,
        jobs=jobs,
        ends={job.id: jobs_of.ends(paths, job.id) for job in jobs},
        steps_done=max(finished_steps, default=0),
        steps_planned=recipe["steps"],
        quiet_s=_quiet(paths, lines, attempts),
        patience_s=run_limit_s,
        start_patience_s=start_limit_s,
        words=last_error(paths.job_log(jobs[-1].id)) if jobs else "",
    )


def slurm(wait_s: float | None = None) -> Slurm:
    """Return the cluster, which must answer within `wait_s` seconds; None: within `ANSWER_S`."""
    return Slurm(deadline_s=ANSWER_S if wait_s is None else wait_s)


def ask(slurm: Slurm, runs: Iterable[RunFacts]) -> SlurmSnapshot:
    """Return Slurm's answer about the jobs of these runs.

    One query is made, only about jobs that may not be over.
    """
    runs = list(runs)
    # The query includes the newest job of each run, which a user may have requeued by hand.
    ids = dict.fromkeys(id for run in runs for id in (*run.open_jobs, *run.job_ids[-1:]))
    try:
        return SlurmSnapshot(slurm.jobs(list(ids)))
    except SlurmError as error:
        return SlurmSnapshot(no_answer_reason=error.message)


def has_open_job(paths: RunPaths, lines: Sequence[JournalLine]) -> bool:
    """Return whether a Slurm job of the run is running or waiting; also True if Slurm does not answer.

    `lines` are the run's journal lines.
    """
    jobs = jobs_of.jobs(paths)
    known = RunFacts(liveness.attempts(lines), jobs, {job.id: jobs_of.ends(paths, job.id) for job in jobs})
    snapshot = ask(slurm(), [known])
    return snapshot.no_answer_reason is not None or bool(snapshot.at_work(known) or snapshot.waiting(known))


def require_idle(paths: RunPaths) -> None:
    """Raise RunAliveError if another process on this host or a Slurm job works on the run.

    A waiting job of the run is an error too, because it would supersede this attempt when it starts. It is not an
    error if this process is in a job of the same run. Raises SlurmError if the state of the jobs is unknown.
    """
    mine = allocation()
    liveness.require_idle(paths, here=None if mine is None else (mine.id, mine.restarts))
    job = _other_job(paths, mine)
    if job is not None and job.is_at_work:
        raise liveness.in_use_error(paths, f"job {job.id} of Slurm is running")
    if job is not None:
        raise RunAliveError(
            f"run `{paths.root}` has a job in Slurm: {job.id} is {job.state}",
            hint=f"check it: ppoctl status {quoted(paths.root)}; end it: ppoctl stop {quoted(paths.root)}",
        )


def _other_job(paths: RunPaths, mine: Allocation | None) -> SlurmJob | None:
    """Return a job of the run that conflicts with this process, a running job first; None: there is none.

    Raises SlurmError if this machine has Slurm but it does not answer, unless this process is in a job itself. This
    job started after the previous jobs had ended, and a process that is cut off from the network can no longer
    publish.
    """
    newest = liveness.attempts(intact(paths.journal))[-1:]
    ids = dict.fromkeys([job.id for job in jobs_of.jobs(paths)] + [str(a["job"]) for a in newest if "job" in a])
    others = [id for id in ids if mine is None or id != mine.id]
    try:
        known = Slurm().jobs(others).values()
    except SlurmAbsentError:
        return None
    except SlurmError as error:
        if mine is not None:
            return None
        raise SlurmError(
            f"it is unknown whether a job is running on run `{paths.root}`: {error.message}",
            hint=f"try again; or, if you know that no job runs: ppoctl resume {quoted(paths.root)} --take-over",
        ) from error
    is_link = mine is not None and mine.id in ids  # the later jobs of its chain wait for its end
    conflicting = [job for job in known if job.is_at_work or (job.is_waiting and not is_link)]
    return min(conflicting, key=lambda job: job.is_waiting, default=None)


def last_error(log: Path) -> str:
    """Return the last error in the log of a job, on one line; empty: there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    # Errors of ppoctl, and of Slurm's daemon: "slurmstepd: error: *** JOB 7 ON node1 CANCELLED DUE TO TIME LIMIT ***"
    errors = [line.partition("error: ")[2] for line in lines if line.startswith(("error: ", "slurmstepd: error: "))]
    return without_secrets(errors[-1].strip()) if errors else ""


def _silence_limits(recipe: JournalLine, stages: Sequence[JournalLine]) -> tuple[float, float]:
    """Return the seconds without a write after which a starting attempt, and a running attempt, is considered hung.

    The limit of a running attempt is ten times the longest stage so far. It is at least
    `cluster.start_deadline_s`, and at most the longest deadline in `[cluster]`.
    """
    deadlines = {key: value for key, value in recipe["cluster"].items() if key.endswith("_deadline_s") and value}
    longest = max(deadlines.values(), default=3600.0)
    if not stages:
        return longest, longest
    ten_times = 10 * max(float(line["seconds"]) for line in stages)
    return longest, min(longest, max(ten_times, deadlines.get("start_deadline_s", 0.0)))


def _quiet(paths: RunPaths, lines: Sequence[JournalLine], attempts: Sequence[JournalLine]) -> float:
    """Return the seconds since the last write to the journal or to a log of the newest attempt or job."""
    written = [float(line["at"]) for line in lines[-1:]]
    logs = [paths.job_log(str(a["job"])) for a in attempts[-1:] if "job" in a]
    logs += [paths.job_log(job.id) for job in jobs_of.jobs(paths)[-1:]]
    logs += [paths.console_log(a["attempt"]) for a in attempts[-1:]]
    written += [log.stat().st_mtime for log in logs if log.is_file()]
    return max(time.time() - max(written), 0.0) if written else 0.0
