"""Stop of a run: a request to the running attempt, and cancellation of jobs that wait to resume the run.

A user can also do each of these by hand. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppoctl.core.errors import ExitCode
from ppoctl.start.slurm.job_start import is_resumable
from ppoctl.start.slurm.run_state import RunFacts, SlurmSnapshot
from ppoctl.start.slurm.run_status import ask, facts
from ppoctl.start.slurm.slurm_client import DEADLINE_S, Slurm
from ppoctl.store.append import intact
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import After, request_stop


@dataclass(frozen=True)
class Stopped:
    """Result of a stop."""

    facts: RunFacts
    """Facts of the run before the stop."""
    snapshot: SlurmSnapshot
    """Slurm's last answer."""
    asked: Mapping[str, Any] | None
    """Attempt that received the stop request; None: no attempt is running."""
    signalled: str | None
    """Job that also received a signal; None: no job."""
    cancelled: tuple[str, ...]
    """Cancelled jobs, in the order of their submission."""
    unheard: tuple[str, ...]
    """Jobs about which Slurm did not answer. They may be waiting, or running without an attempt."""

    @property
    def job(self) -> str | None:
        """Id of the job of the attempt that received the request."""
        return None if self.asked is None or "job" not in self.asked else str(self.asked["job"])


def stop(paths: RunPaths, after: After, slurm: Slurm) -> Stopped:
    """Request that the running attempt stops, and cancel the run's jobs that wait or run without an attempt.

    Raises StorageError if the request cannot be written; SlurmError if Slurm refuses. Earlier actions are not undone.
    """
    patient = replace(slurm, deadline_s=max(slurm.deadline_s, DEADLINE_S))
    run = facts(RecordedRun(paths), intact(paths.journal))
    snapshot = ask(slurm, [run])
    attempt = next(_running_attempt(run, snapshot), None)
    if attempt is not None:
        request_stop(paths, after)
    attempt_job = str(attempt["job"]) if attempt is not None and "job" in attempt else None
    waiting = [job.id for job in snapshot.waiting(run)]
    for id in reversed(waiting):  # last job first: the end of a job would start the next job of its chain
        patient.cancel(id, waiting_only=True)
    if waiting:
        snapshot = ask(slurm, [run])
    # Jobs that waited and have started by now are cancelled too: they have no running attempt yet. Jobs that ppoctl
    # did not submit, such as an interactive job of the user, are not cancelled.
    own = {job.id for job in run.jobs} - {attempt_job}
    idle = [job.id for job in snapshot.at_work(run) if job.id in own and _would_resume(run.attempt_of(job))]
    for id in idle:
        patient.cancel(id)
    signalled = None
    if after == "now" and snapshot.no_answer_reason is None and attempt_job in {job.id for job in run.jobs}:
        assert attempt_job is not None
        signalled = attempt_job if patient.signal(attempt_job, "TERM") else None
    over = {id for id in waiting if id not in snapshot.jobs or snapshot.jobs[id].is_over}
    return Stopped(
        facts=run,
        snapshot=snapshot,
        asked=attempt,
        signalled=signalled,
        cancelled=tuple(id for id in run.job_ids if id in over or id in idle),
        unheard=tuple(id for id in run.open_jobs if id != attempt_job)
        if snapshot.no_answer_reason is not None
        else (),
    )


def _would_resume(attempt: Mapping[str, Any] | None) -> bool:
    """Return whether a running job would start an attempt or be requeued; `attempt` is the job's last, if any."""
    return attempt is None or is_resumable(attempt.get("exit_code", ExitCode.PREEMPTED))


def _running_attempt(run: RunFacts, snapshot: SlurmSnapshot) -> Iterator[Mapping[str, Any]]:
    """Yield the attempt that is running, or that may be running if its state is unknown."""
    newest = run.newest
    if newest is None or "exit_code" in newest or newest["status"] == "killed":
        return
    in_a_job = "job" in newest and newest["status"] != "running"
    if (
        not in_a_job
        or snapshot.no_answer_reason is not None
        or newest in [run.attempt_of(job) for job in snapshot.at_work(run)]
    ):
        yield newest
