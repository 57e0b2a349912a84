"""Runs as they are now: what their folders say, and one question to Slurm for all of their jobs. Light."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ppoctl.errors import RunAliveError, SlurmError, quoted, without_secrets
from ppoctl.slurm.allocation import Allocation, allocation
from ppoctl.slurm.client import Slurm, SlurmAbsentError, SlurmJob
from ppoctl.slurm.run_state import RunFacts, SlurmSnapshot
from ppoctl.store import jobs as jobs_of
from ppoctl.store import liveness
from ppoctl.store.append import intact
from ppoctl.store.journal import JournalLine
from ppoctl.store.outline import outlines_of
from ppoctl.store.run_dir import recipes
from ppoctl.store.run_paths import RunPaths

ANSWER_S = 0.5
"""Seconds that Slurm has to answer whoever only looks; a busy controller may need more."""

TAIL_BYTES = 16384
"""Bytes at the end of a job's log in which its last error is searched."""


def facts(paths: RunPaths, lines: Sequence[JournalLine]) -> RunFacts:
    """What the folder of a run says of it; `lines`: its journal. Raises StorageError where it cannot be read."""
    outlines, asked = outlines_of(paths), recipes(paths)
    recipe = asked[max(asked)]
    attempts = liveness.attempts(lines)
    jobs = jobs_of.jobs(paths)
    stages = [line for line in lines if "stage" in line]
    is_whole = (line["step"] for line in stages if line["stage"] == outlines.at(line["step"]).last)
    deadline_s, patience_s = _patience(recipe, stages)
    return RunFacts(
        attempts=attempts,
        jobs=jobs,
        ends={job.id: jobs_of.ends(paths, job.id) for job in jobs},
        steps_done=max(is_whole, default=0),
        steps_planned=recipe["steps"],
        quiet_s=_quiet(paths, lines, attempts),
        patience_s=patience_s,
        start_patience_s=deadline_s,
        words=last_error(paths.job_log(jobs[-1].id)) if jobs else "",
    )


def slurm(wait_s: float | None = None) -> Slurm:
    """The cluster, with so many seconds to answer."""
    return Slurm(deadline_s=ANSWER_S if wait_s is None else wait_s)


def ask(slurm: Slurm, runs: Iterable[RunFacts]) -> SlurmSnapshot:
    """What Slurm says of the jobs of these runs; it is asked once, and only about jobs that may not be over."""
    runs = list(runs)
    # The newest of each besides: somebody may have put it back into the queue by hand.
    ids = dict.fromkeys(id for run in runs for id in (*run.open_jobs, *run.job_ids[-1:]))
    if not ids:
        return SlurmSnapshot()
    try:
        return SlurmSnapshot(slurm.jobs(list(ids)))
    except SlurmError as error:
        return SlurmSnapshot(no_answer_reason=error.message)


def has_open_job(paths: RunPaths, lines: Sequence[JournalLine]) -> bool:
    """Whether Slurm has a job of the run that runs or waits; True, too, where it does not say. `lines`: the run's
    journal."""
    jobs = jobs_of.jobs(paths)
    known = RunFacts(liveness.attempts(lines), jobs, {job.id: jobs_of.ends(paths, job.id) for job in jobs})
    told = ask(slurm(), [known])
    return told.no_answer_reason is not None or bool(told.at_work(known) or told.waiting(known))


def require_idle(paths: RunPaths) -> None:
    """Raise RunAliveError while another process of this host, or a job of Slurm, is at work on the run. A job of it
    that waits is in the way as well, because it would take the run away when it begins; but not in the way of the
    run's other jobs. Raises SlurmError where all that is unknown."""
    mine = allocation()
    liveness.require_idle(paths, here=None if mine is None else (mine.id, mine.restarts))
    job = _other_job(paths, mine)
    if job is not None and job.is_at_work:
        raise liveness.in_use_error(paths, f"job {job.id} of Slurm is running")
    if job is not None:
        raise RunAliveError(
            f"run `{paths.root}` has a job in Slurm: {job.id} is {job.state}",
            hint=f"see it: ppoctl status {quoted(paths.root)}; end it: ppoctl stop {quoted(paths.root)}",
        )


def _other_job(paths: RunPaths, mine: Allocation | None) -> SlurmJob | None:
    """A job of the run that is in the way of this process, one at work first; None: none is.

    Raises SlurmError where Slurm is here and does not answer, unless this process is in a job itself: that begins
    when those before it have ended, and what is still alive behind a cut network cannot publish any more.
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
            f"whether a job is at work on run `{paths.root}` is unknown: {error.message}",
            hint=f"ask again; or, if you know that none is: ppoctl resume {quoted(paths.root)} --take-over",
        ) from error
    is_link = mine is not None and mine.id in ids  # the next ones of its chain wait for its end
    found = [job for job in known if job.is_at_work or (job.is_waiting and not is_link)]
    return min(found, key=lambda job: job.is_waiting, default=None)


def last_error(log: Path) -> str:
    """The last error in the log of a job, on one line; empty: there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    # Of ours, and of Slurm's own daemon: "slurmstepd: error: *** JOB 7 ON node1 CANCELLED ... DUE TO TIME LIMIT ***"
    found = [line.partition("error: ")[2] for line in lines if line.startswith(("error: ", "slurmstepd: error: "))]
    return without_secrets(found[-1].strip()) if found else ""


def _patience(recipe: JournalLine, stages: Sequence[JournalLine]) -> tuple[float, float]:
    """Seconds of silence that are too long before an attempt begins, and when it is at work: there ten times the
    longest stage so far, but no less than a start may take, and no more than the longest deadline."""
    deadlines = {key: value for key, value in recipe["cluster"].items() if key.endswith("_deadline_s") and value}
    longest = max(deadlines.values(), default=3600.0)
    if not stages:
        return longest, longest
    ten_times = 10 * max(float(line["seconds"]) for line in stages)
    return longest, min(longest, max(ten_times, deadlines.get("start_deadline_s", 0.0)))


def _quiet(paths: RunPaths, lines: Sequence[JournalLine], attempts: Sequence[JournalLine]) -> float:
    """Seconds since the journal or a console log was written."""
    written = [float(line["at"]) for line in lines[-1:]]
    logs = [paths.job_log(str(a["job"])) for a in attempts[-1:] if "job" in a]
    logs += [paths.job_log(job.id) for job in jobs_of.jobs(paths)[-1:]]
    logs += [paths.console_log(a["attempt"]) for a in attempts[-1:]]
    written += [log.stat().st_mtime for log in logs if log.is_file()]
    return max(time.time() - max(written), 0.0) if written else 0.0
