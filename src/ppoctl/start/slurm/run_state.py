"""State of a run, from its own files and Slurm's answer about its jobs. Pure functions: this module reads nothing.

The first row that applies decides. An attempt is "open" if the journal has no end of it, and "alive" if its process
runs on this host. A job is "over" if Slurm reports it as ended, or if its script recorded an end with an exit code
after which no job continues.

    newest attempt           its job, or the run's jobs             state
    -----------------------  -------------------------------------  ------------------------------------------
    open, alive              any                                    running; hung if silent for too long
    open                     running since the same restart         running; hung if silent for too long
    any                      running, suspended                     suspended
    open, not alive          running since the same restart         killed
    ended                    running since the same restart         as the attempt ended; the job is ending
    none of that restart     running                                starting; hung if silent for too long
    finished, unmet          any                                    finished, unmet
    any                      one waits that never ran               pending, with reason and expected start
    any                      one waits that ran before              requeued, with number of requeues, as above
    open                     no answer                              unknown, with the time of the last write
    none since it            submitted; no answer                   submitted
    open, or none since      over: cancelled                        cancelled
    open, or none since      over otherwise                         failed, with Slurm's state and exit code
    open, or none since      unknown; its script recorded an end    by the exit code
    open, or none since      unknown; no end is recorded            lost
    preempted                over: cancelled                        cancelled
    ended                    over or none                           as it ended: failed, interrupted, short, ...
    open, not alive          none                                   killed
    open on another host     none                                   unknown
    none                     none                                   created
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppoctl.core.clock import duration
from ppoctl.core.errors import ExitCode
from ppoctl.start.slurm.job_start import is_resumable
from ppoctl.start.slurm.slurm_client import SlurmJob
from ppoctl.store.jobs import JobRecord, ScriptEnd, last_end
from ppoctl.store.liveness import EARLY_END

AT_WORK = frozenset({"running", "starting", "hung", "suspended"})
WAITING = frozenset({"pending", "requeued", "submitted"})
DONE = frozenset({"finished", "unmet"})

_STATUS: dict[int, str] = {
    ExitCode.DONE: "finished",
    ExitCode.HEALTH: "stopped",
    ExitCode.SHORT: "short",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.INTERRUPTED: "interrupted",
}
"""Status that the journal has for an attempt with that exit code; all other codes are `failed`."""

_BUT_UNMET = ", but the run does not meet `[expect]`"
_DESCRIPTIONS = {
    "finished": "all steps are done",
    "unmet": f"all steps are done{_BUT_UNMET}",
    "short": "{attempt} ended cleanly before the last step",
    "stopped": "a health rule or a check stopped {attempt}",
    "interrupted": "{attempt} was stopped by `ppoctl stop` or Ctrl-C",
    "preempted": "{attempt} received a signal to stop, and ended cleanly",
    "superseded": "{attempt} was superseded by a newer attempt",
    "killed": "the process of {attempt} ended without reporting an error: it was killed, or its machine restarted",
}

WORDS = frozenset({*AT_WORK, *WAITING, *_DESCRIPTIONS, "created", "cancelled", "failed", "lost", "unknown"})
"""Every state that a run may be in."""

_REASONS = {
    "DependencyNeverSatisfied": "the job that it waits for failed, so that it never starts",
    "JobHeldUser": "a user holds it (scontrol release {id})",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionConfig": "the partition can never give the requested resources",
    "BeginTime": "Slurm delays its start",
}
"""Meaning of some of Slurm's reasons for the user."""


@dataclass(frozen=True)
class RunFacts:
    """Facts from the run's own files and the processes of this host."""

    attempts: Sequence[Mapping[str, Any]] = ()
    """Attempts from `store.liveness.attempts`, oldest first."""
    jobs: Sequence[JobRecord] = ()
    """Jobs that were submitted for the run, oldest first."""
    ends: Mapping[str, Sequence[ScriptEnd]] = field(default_factory=dict)
    """Recorded ends of the jobs' scripts, by job id, in the order of restarts."""
    steps_done: int = 0
    steps_planned: int = 0
    quiet_s: float = 0.0
    """Seconds since the last write to the journal or to a log of the newest attempt or job."""
    patience_s: float = 3600.0
    """Seconds without a write after which a running attempt is considered hung."""
    start_patience_s: float = 3600.0
    """Seconds without a write after which a job whose attempt has not started is considered hung."""
    words: str = ""
    """Last error in the log of the newest job; empty: there is none."""

    @property
    def newest(self) -> Mapping[str, Any] | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Ids of all jobs of the run, in order of submission. Ids that only an attempt recorded come last."""
        named = (str(attempt["job"]) for attempt in self.attempts if "job" in attempt)
        return tuple(dict.fromkeys([*(job.id for job in self.jobs), *named]))

    @property
    def open_jobs(self) -> tuple[str, ...]:
        """Ids of the jobs that may still run, according to the run's own files."""
        return tuple(id for id in self.job_ids if not self._is_over(id))

    def attempt_of(self, job: SlurmJob) -> Mapping[str, Any] | None:
        """Return the attempt that started in the job since its last requeue; None: no attempt yet."""
        mine = [a for a in self.attempts if str(a.get("job")) == job.id and int(a.get("restart", 0)) == job.restarts]
        return mine[-1] if mine else None

    def last_end(self, id: str) -> ScriptEnd | None:
        """Return the recorded end of the job's last run; None: the script recorded no end."""
        began = (int(a.get("restart", 0)) for a in self.attempts if str(a.get("job")) == id)
        return last_end(self.ends.get(id, ()), began)

    def _is_over(self, id: str) -> bool:
        end = self.last_end(id)
        return end is not None and not is_resumable(end.code)


@dataclass(frozen=True)
class SlurmSnapshot:
    """Slurm's answer about a run's jobs."""

    jobs: Mapping[str, SlurmJob] = field(default_factory=dict)
    """Jobs in Slurm's answer, by id."""
    no_answer_reason: str | None = None
    """Reason why Slurm did not answer; None: it answered."""

    def at_work(self, facts: RunFacts) -> list[SlurmJob]:
        """Return the running jobs of the run, in the order of their submission."""
        return [job for job in self._of(facts) if job.is_at_work]

    def waiting(self, facts: RunFacts) -> list[SlurmJob]:
        """Return the waiting jobs of the run, in the order of their submission."""
        return [job for job in self._of(facts) if job.is_waiting]

    def _of(self, facts: RunFacts) -> list[SlurmJob]:
        return [self.jobs[id] for id in facts.job_ids if id in self.jobs]


@dataclass(frozen=True)
class RunState:
    """State of a run."""

    word: str
    """One of the states of the module's table."""
    description: str
    """One sentence about the state: where the run is in it, since when, and why."""


def run_state(facts: RunFacts, snapshot: SlurmSnapshot, *, now: float) -> RunState:
    """Return the state of a run at `now`, in unix seconds, from the table in the docstring of this module."""
    state = (
        _on_this_host(facts)
        or _in_running_job(facts, snapshot, now)
        or _all_done(facts)
        or _in_queue(facts, snapshot, now)
        or _without_answer(facts, snapshot)
        or _in_ended_job(facts, snapshot)
        or _as_it_ended(facts)
        or RunState("created", "the run has not started")
    )
    return _with_unknown_jobs(state, facts, snapshot)


def attempts_as_known(facts: RunFacts, snapshot: SlurmSnapshot) -> list[dict[str, Any]]:
    """Return the attempts; Slurm's answer decides whether an attempt on another host is running or was killed."""
    running = [facts.attempt_of(job) for job in snapshot.at_work(facts)]
    attempts = []
    for attempt in facts.attempts:
        is_known = snapshot.no_answer_reason is None or not _may_be_at_work(attempt, facts)
        if "job" in attempt and _is_open(attempt) and attempt["status"] not in ("running", "killed") and is_known:
            attempts.append({**attempt, "status": "running" if attempt in running else "killed"})
        else:
            attempts.append(dict(attempt))
    return attempts


def _on_this_host(facts: RunFacts) -> RunState | None:
    newest = facts.newest
    if newest is None or newest["status"] != "running":
        return None
    return _working(facts, newest, f"as process {newest['pid']} of this host")


def _in_running_job(facts: RunFacts, snapshot: SlurmSnapshot, now: float) -> RunState | None:
    for job in snapshot.at_work(facts):
        attempt = facts.attempt_of(job)
        where = f"job {job.id}" + (f" on {job.nodes}" if job.nodes else "")
        if job.state == "SUSPENDED":
            return RunState("suspended", f"Slurm has suspended {where}: its processes are paused")
        if attempt is None:
            since = now - (now if job.starts_at is None else job.starts_at)
            if min(since, facts.quiet_s) > facts.start_patience_s:
                return RunState("hung", f"{where} started {duration(since)} ago, but no attempt started in it")
            return RunState("starting", f"{where} started {duration(since)} ago; its attempt has not started yet")
        if attempt["status"] == "killed":
            return RunState("killed", f"{_DESCRIPTIONS['killed'].format(attempt=_name(attempt))}; {where} still runs")
        if _is_open(attempt):
            return _working(facts, attempt, f"in {where}{_until(job, now)}")
        ended = _ended(attempt, facts)
        return RunState(ended.word, f"{ended.description}; job {job.id} is ending")
    return None


def _working(facts: RunFacts, attempt: Mapping[str, Any], where: str) -> RunState:
    quiet = duration(facts.quiet_s)
    if facts.quiet_s > facts.patience_s:
        limit = f"longer than the limit of {duration(facts.patience_s)}"
        return RunState("hung", f"{_name(attempt)} runs {where}, but wrote nothing for {quiet}: {limit}")
    return RunState("running", f"{_name(attempt)} is running {where}; it last wrote {quiet} ago")


def _all_done(facts: RunFacts) -> RunState | None:
    newest = facts.newest
    return _ended(newest, facts) if newest is not None and newest["status"] in DONE else None


def _in_queue(facts: RunFacts, snapshot: SlurmSnapshot, now: float) -> RunState | None:
    waiting = snapshot.waiting(facts)
    if not waiting:
        return None
    first, *others = waiting
    times = f", for the {_ordinal(first.restarts)} time," if first.restarts else ""
    description = f"job {first.id} is back in the queue{times}" if first.restarts else f"job {first.id} waits"
    if first.reason:
        meaning = _REASONS.get(first.reason, "").format(id=first.id)
        description += f" for `{first.reason}`" + (f": {meaning}" if meaning else "")
    if first.starts_at is not None:
        description += f"; Slurm expects to start it {_clock_time(first.starts_at, now)}"
    if others:
        description += f"; after it: {_jobs(job.id for job in others)}"
    return RunState("requeued" if first.restarts else "pending", description)


def _without_answer(facts: RunFacts, snapshot: SlurmSnapshot) -> RunState | None:
    newest = facts.newest
    if snapshot.no_answer_reason is None:
        return None
    if newest is not None and _is_open(newest) and newest["status"] != "killed" and _may_be_at_work(newest, facts):
        where = f"in job {newest['job']} on {newest['host']}"
        return RunState("unknown", f"{_name(newest)} started {where}, and last wrote {duration(facts.quiet_s)} ago")
    last = _last_without_attempt(facts)
    if last is not None and last.id in facts.open_jobs:
        return RunState("submitted", f"job {last.id} was submitted; the run has no record of its start")
    return None


def _in_ended_job(facts: RunFacts, snapshot: SlurmSnapshot) -> RunState | None:
    newest, last = facts.newest, _last_without_attempt(facts)
    if last is not None and (snapshot.no_answer_reason is None or last.id not in facts.open_jobs):
        return _over(last.id, facts, snapshot, "no attempt started in it")
    if newest is None or "job" not in newest:
        return None
    id = str(newest["job"])
    if _is_open(newest):
        if snapshot.no_answer_reason is not None and _may_be_at_work(newest, facts):
            return None
        return _over(id, facts, snapshot, f"{_name(newest)} did not record how it ended")
    was_cancelled = id in snapshot.jobs and snapshot.jobs[id].state == "CANCELLED"
    if newest["status"] == "preempted" and was_cancelled:
        return RunState("cancelled", f"job {id} was cancelled; {_name(newest)} ended cleanly")
    return None


def _over(id: str, facts: RunFacts, snapshot: SlurmSnapshot, attempt_end: str) -> RunState:
    """Return the state of a run whose last job has ended. `attempt_end` is the clause about its attempt."""
    job, end = snapshot.jobs.get(id), facts.last_end(id)
    if job is not None and job.state == "CANCELLED":
        return RunState("cancelled", f"job {id} was cancelled; {attempt_end}")
    if job is not None:
        code = f", exit code {job.exit_code}" if job.exit_code not in ("", "0:0") else ""
        return RunState("failed", f"job {id} ended with `{job.state}`{code}; {attempt_end}{_with_error(facts)}")
    if end is not None:
        word = _STATUS.get(end.code, "failed")
        return RunState(
            word, f"the script of job {id} ended with {_code(end.code)}; {attempt_end}{_with_error(facts)}"
        )
    return RunState("lost", f"Slurm does not know job {id}, and the job recorded no end; {attempt_end}")


def _as_it_ended(facts: RunFacts) -> RunState | None:
    newest = facts.newest
    if newest is None:
        return None
    if _is_open(newest) and newest["status"] != "killed":
        return RunState(
            "unknown", f"{_name(newest)} is {newest['status']}; it last wrote {duration(facts.quiet_s)} ago"
        )
    return _ended(newest, facts)


def _ended(attempt: Mapping[str, Any], facts: RunFacts) -> RunState:
    """Return the state of an ended attempt, from the journal."""
    status, early = str(attempt["status"]), attempt.get(EARLY_END)
    if early is not None and status in DONE:
        but = _BUT_UNMET if status == "unmet" else ""
        return RunState(status, f"`[until]` ended the run after step {facts.steps_done}: {early}{but}")
    if status in _DESCRIPTIONS:
        return RunState(status, _DESCRIPTIONS[status].format(attempt=_name(attempt)))
    return RunState(status, f"{_name(attempt)} ended with {_code(int(attempt['exit_code']))}{_with_error(facts)}")


def _with_unknown_jobs(state: RunState, facts: RunFacts, snapshot: SlurmSnapshot) -> RunState:
    if snapshot.no_answer_reason is None or state.word in DONE or not facts.open_jobs:
        return state
    jobs = _jobs(facts.open_jobs)
    return RunState(state.word, f"{state.description}; the state of {jobs} is unknown: {snapshot.no_answer_reason}")


def _last_without_attempt(facts: RunFacts) -> JobRecord | None:
    """Return the newest job if it was submitted after the newest attempt ended and no attempt started in it."""
    if not facts.jobs:
        return None
    last, newest = facts.jobs[-1], facts.newest
    if newest is None:
        return last
    began_in_it = any(str(attempt.get("job")) == last.id for attempt in facts.attempts)
    is_later = not _is_open(newest) and float(newest["ended_at"]) < last.submitted_at
    return last if is_later and not began_in_it else None


def _may_be_at_work(attempt: Mapping[str, Any], facts: RunFacts) -> bool:
    """Return whether the attempt is in a job whose script has recorded no end since the attempt started."""
    ends = facts.ends.get(str(attempt.get("job")), ())
    return "job" in attempt and not any(end.restart >= int(attempt.get("restart", 0)) for end in ends)


def _is_open(attempt: Mapping[str, Any]) -> bool:
    return "exit_code" not in attempt


def _name(attempt: Mapping[str, Any]) -> str:
    return f"attempt {attempt['attempt']}"


def _code(code: int) -> str:
    if code in {*ExitCode}:
        return f"exit code {code} ({ExitCode(code).name.lower()})"
    return f"exit code {code}" + (f" (signal {code - 128})" if code > 128 else "")


def _with_error(facts: RunFacts) -> str:
    return f": {facts.words}" if facts.words else ""


def _jobs(ids: Iterable[str]) -> str:
    names = list(ids)
    return f"job {names[0]}" if len(names) == 1 else f"jobs {', '.join(names)}"


def _until(job: SlurmJob, now: float) -> str:
    return "" if job.ends_at is None else f", which Slurm ends {_clock_time(job.ends_at, now)}"


def _clock_time(at: float, now: float) -> str:
    """Return a future time in the local time zone, with the time until then."""
    is_near = abs(at - now) < 12 * 3600
    local_time = time.strftime("at %H:%M" if is_near else "on %Y-%m-%d at %H:%M", time.localtime(at))
    return f"{local_time} (in {duration(at - now)})" if at >= now + 1 else f"{local_time}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
