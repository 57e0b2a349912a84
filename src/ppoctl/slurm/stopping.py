"""How a run is stopped: a request to the attempt that is at work, and the end of what waits to go on. Light; nothing
is done that its user could not do by hand."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppoctl.errors import ExitCode
from ppoctl.slurm.client import DEADLINE_S, Slurm
from ppoctl.slurm.job_start import is_resumable
from ppoctl.slurm.run_state import RunFacts, SlurmSnapshot
from ppoctl.slurm.run_status import ask, facts
from ppoctl.store.append import intact
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import After, request_stop


@dataclass(frozen=True)
class Stopped:
    """What was done to stop a run."""

    facts: RunFacts
    """What the run said of itself before."""
    snapshot: SlurmSnapshot
    """What Slurm said last."""
    asked: Mapping[str, Any] | None
    """Attempt that was asked to stop; None: none is at work."""
    signalled: str | None
    """Job that was told besides; None: none."""
    cancelled: tuple[str, ...]
    """Jobs that were cancelled, in the order of their submission."""
    unheard: tuple[str, ...]
    """Jobs that may wait, or be at work without an attempt: Slurm did not answer."""

    @property
    def job(self) -> str | None:
        """Id of the job that the asked attempt is in."""
        return None if self.asked is None or "job" not in self.asked else str(self.asked["job"])


def stop(paths: RunPaths, after: After, slurm: Slurm) -> Stopped:
    """Ask the attempt that is at work to stop, and cancel the jobs of the run that wait, or hold nodes while no
    attempt is at work there.

    Raises StorageError where the request cannot be written, SlurmError where Slurm refuses; what was done by then
    stays done.
    """
    patient = replace(slurm, deadline_s=max(slurm.deadline_s, DEADLINE_S))
    found = facts(paths, intact(paths.journal))
    told = ask(slurm, [found])
    asked = next(_at_work(found, told), None)
    if asked is not None:
        request_stop(paths, after)
    mine = str(asked["job"]) if asked is not None and "job" in asked else None
    waiting = [job.id for job in told.waiting(found)]
    for id in reversed(waiting):  # or the end of one would let the next one begin
        patient.cancel(id, waiting_only=True)
    if waiting:
        told = ask(slurm, [found])
    # What waited and has begun by now is among them: no attempt of it is at work yet. One in which somebody works by
    # hand is not.
    own = {job.id for job in found.jobs} - {mine}
    idle = [job.id for job in told.at_work(found) if job.id in own and _would_go_on(found.attempt_of(job))]
    for id in idle:
        patient.cancel(id)
    is_told = after == "now" and mine in {job.id for job in found.jobs} and told.no_answer_reason is None
    if is_told and mine is not None:
        patient.signal(mine, "TERM")
    over = {id for id in waiting if id not in told.jobs or told.jobs[id].is_over}
    return Stopped(
        facts=found,
        snapshot=told,
        asked=asked,
        signalled=mine if is_told else None,
        cancelled=tuple(id for id in found.job_ids if id in over or id in idle),
        unheard=tuple(id for id in found.open_jobs if id != mine) if told.no_answer_reason is not None else (),
    )


def _would_go_on(attempt: Mapping[str, Any] | None) -> bool:
    """Whether a job that it has ended in would begin or go back into the queue; None: it has not begun there."""
    return attempt is None or is_resumable(attempt.get("exit_code", ExitCode.PREEMPTED))


def _at_work(found: RunFacts, told: SlurmSnapshot) -> Iterator[Mapping[str, Any]]:
    """The attempt that is at work, or may be where nobody can tell."""
    newest = found.newest
    if newest is None or "exit_code" in newest or newest["status"] == "killed":
        return
    in_a_job = "job" in newest and newest["status"] != "running"
    if (
        not in_a_job
        or told.no_answer_reason is not None
        or newest in [found.attempt_of(job) for job in told.at_work(found)]
    ):
        yield newest
