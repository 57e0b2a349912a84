"""What a run is doing: its own word, held against what Slurm says of its jobs. Pure: nothing is read or asked here.

The first row that fits counts. "Open" is an attempt without an end in the journal; "there" a process of this host; a
job is over when Slurm says so, or when its script wrote an end and its code is one that does not go on.

    newest attempt           its job, or the run's jobs             state
    -----------------------  -------------------------------------  ------------------------------------------
    open, there              any                                    running; hung when silent for too long
    open                     at work since the same restart         running; hung when silent for too long
    any                      at work, suspended                     suspended
    open, not there any more at work since the same restart         killed
    ended                    at work since the same restart         as the attempt ended; the job is about to
    none of that restart     at work                                starting; hung when silent for too long
    finished, unmet          any                                    finished, unmet
    any                      one waits that never ran               pending, with reason and expected start
    any                      one waits that ran before              requeued, how often, as above
    open                     no answer                              unknown, with what the run wrote last
    none since it            submitted; no answer                   submitted
    open, or none since      over: cancelled                        cancelled
    open, or none since      over otherwise                         failed, with Slurm's word and exit code
    open, or none since      forgotten; its script wrote an end     as the code says
    open, or none since      forgotten; no end is written anywhere  lost
    preempted                over: cancelled                        cancelled
    ended                    over or none                           as it ended: failed, interrupted, short, ...
    open, not there any more none                                   killed
    open on another host     none                                   unknown
    none                     none                                   created
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppoctl.clock import duration
from ppoctl.errors import ExitCode
from ppoctl.slurm.client import SlurmJob
from ppoctl.slurm.job_start import is_resumable
from ppoctl.store.jobs import JobRecord, ScriptEnd, last_end

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
"""How an attempt with that exit code ended, as the journal would have it; others failed."""

_SAYS = {
    "finished": "all steps are done",
    "unmet": "all steps are done, without what `[expect]` asks for",
    "short": "{attempt} ended in order, before the last step",
    "stopped": "a health rule or a check stopped {attempt}",
    "interrupted": "{attempt} was stopped by `ppoctl stop` or Ctrl-C",
    "preempted": "{attempt} was told to make room, and ended in order",
    "superseded": "{attempt} made way for a newer one",
    "killed": "the process of {attempt} is gone without a word: it was killed, or its machine started anew",
}

WORDS = frozenset({*AT_WORK, *WAITING, *_SAYS, "created", "cancelled", "failed", "lost", "unknown"})
"""Every state that a run may be in."""

_REASONS = {
    "DependencyNeverSatisfied": "what it waits for did not end as it should have: it never starts",
    "JobHeldUser": "somebody holds it back (scontrol release {id})",
    "JobHeldAdmin": "an administrator holds it back",
    "PartitionConfig": "the partition cannot give what it asks for, whatever is free",
    "BeginTime": "Slurm lets some time pass first",
}
"""What some of Slurm's reasons mean for whoever waits."""


@dataclass(frozen=True)
class RunFacts:
    """What the run's own files say, and the processes of this host."""

    attempts: Sequence[Mapping[str, Any]] = ()
    """Attempts as `store.alive.attempts` has them, oldest first."""
    jobs: Sequence[JobRecord] = ()
    """Jobs that were submitted for the run, oldest first."""
    ends: Mapping[str, Sequence[ScriptEnd]] = field(default_factory=dict)
    """Ends of their scripts, by id, in the order of restarts."""
    steps_done: int = 0
    steps_planned: int = 0
    quiet_s: float = 0.0
    """Seconds since the journal or the console of the newest attempt wrote anything."""
    patience_s: float = 3600.0
    """Seconds of silence that are too long for an attempt at work."""
    start_patience_s: float = 3600.0
    """Seconds of silence that are too long for a job whose attempt has not begun."""
    words: str = ""
    """Last error that a job wrote into its log; empty: none."""

    @property
    def newest(self) -> Mapping[str, Any] | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Ids of all its jobs, in the order of their submission; one that an attempt alone names comes last."""
        named = (str(attempt["job"]) for attempt in self.attempts if "job" in attempt)
        return tuple(dict.fromkeys([*(job.id for job in self.jobs), *named]))

    @property
    def open_jobs(self) -> tuple[str, ...]:
        """Ids of the jobs that may still have something to do, as far as the run itself knows."""
        return tuple(id for id in self.job_ids if not self._is_over(id))

    def attempt_of(self, job: SlurmJob) -> Mapping[str, Any] | None:
        """The attempt that began in the job since it last left the queue; None: none yet."""
        mine = [a for a in self.attempts if str(a.get("job")) == job.id and int(a.get("restart", 0)) == job.restarts]
        return mine[-1] if mine else None

    def last_end(self, id: str) -> ScriptEnd | None:
        """How the job ended when it ran last; None: it wrote nothing."""
        began = (int(a.get("restart", 0)) for a in self.attempts if str(a.get("job")) == id)
        return last_end(self.ends.get(id, ()), began)

    def _is_over(self, id: str) -> bool:
        end = self.last_end(id)
        return end is not None and not is_resumable(end.code)


@dataclass(frozen=True)
class SlurmSnapshot:
    """What Slurm says of a run's jobs."""

    jobs: Mapping[str, SlurmJob] = field(default_factory=dict)
    """Those that it knows of, by id."""
    no_answer_reason: str | None = None
    """Why it says nothing; None: it answered."""

    def at_work(self, facts: RunFacts) -> list[SlurmJob]:
        """Jobs of the run that hold nodes, in the order of their submission."""
        return [job for job in self._of(facts) if job.is_at_work]

    def waiting(self, facts: RunFacts) -> list[SlurmJob]:
        """Jobs of the run that wait, in the order of their submission."""
        return [job for job in self._of(facts) if job.is_waiting]

    def _of(self, facts: RunFacts) -> list[SlurmJob]:
        return [self.jobs[id] for id in facts.job_ids if id in self.jobs]


@dataclass(frozen=True)
class RunState:
    """What a run is doing."""

    word: str
    """One of the states of the table above."""
    description: str
    """One sentence: where, since when, why."""


def run_state(facts: RunFacts, told: SlurmSnapshot, *, now: float) -> RunState:
    """The state of a run at `now`, in unix seconds; see the table above."""
    state = (
        _here(facts)
        or _in_a_job(facts, told, now)
        or _all_done(facts)
        or _in_the_queue(facts, told, now)
        or _unheard(facts, told)
        or _in_a_job_that_is_over(facts, told)
        or _as_it_ended(facts)
        or RunState("created", "nothing of it has begun")
    )
    return _with_what_is_unknown(state, facts, told)


def attempts_as_known(facts: RunFacts, told: SlurmSnapshot) -> list[dict[str, Any]]:
    """The attempts, where Slurm's word says of one on another host whether it runs or was killed."""
    running = [facts.attempt_of(job) for job in told.at_work(facts)]
    found = []
    for attempt in facts.attempts:
        is_known = told.no_answer_reason is None or not _may_be_at_work(attempt, facts)
        if "job" in attempt and _is_open(attempt) and attempt["status"] not in ("running", "killed") and is_known:
            found.append({**attempt, "status": "running" if attempt in running else "killed"})
        else:
            found.append(dict(attempt))
    return found


def _here(facts: RunFacts) -> RunState | None:
    newest = facts.newest
    if newest is None or newest["status"] != "running":
        return None
    return _working(facts, newest, f"as process {newest['pid']} of this host")


def _in_a_job(facts: RunFacts, told: SlurmSnapshot, now: float) -> RunState | None:
    for job in told.at_work(facts):
        attempt = facts.attempt_of(job)
        where = f"job {job.id}" + (f" on {job.nodes}" if job.nodes else "")
        if job.state == "SUSPENDED":
            return RunState("suspended", f"Slurm has suspended {where}: its processes stand still")
        if attempt is None:
            since = now - (now if job.starts_at is None else job.starts_at)
            if min(since, facts.quiet_s) > facts.start_patience_s:
                return RunState("hung", f"{where} began {duration(since)} ago, and no attempt did")
            return RunState("starting", f"{where} began {duration(since)} ago; its attempt has not begun yet")
        if attempt["status"] == "killed":
            return RunState("killed", f"{_SAYS['killed'].format(attempt=_name(attempt))}; {where} is still there")
        if _is_open(attempt):
            return _working(facts, attempt, f"in {where}{_until(job, now)}")
        ended = _ended(attempt, facts)
        return RunState(ended.word, f"{ended.description}; job {job.id} is about to end")
    return None


def _working(facts: RunFacts, attempt: Mapping[str, Any], where: str) -> RunState:
    quiet = duration(facts.quiet_s)
    if facts.quiet_s > facts.patience_s:
        too_long = f"longer than {duration(facts.patience_s)}, which is more than it ever should be"
        return RunState("hung", f"{_name(attempt)} is there, {where}, but wrote nothing for {quiet}: {too_long}")
    return RunState("running", f"{_name(attempt)} is at work {where}; it last wrote {quiet} ago")


def _all_done(facts: RunFacts) -> RunState | None:
    newest = facts.newest
    return _ended(newest, facts) if newest is not None and newest["status"] in DONE else None


def _in_the_queue(facts: RunFacts, told: SlurmSnapshot, now: float) -> RunState | None:
    waiting = told.waiting(facts)
    if not waiting:
        return None
    first, *others = waiting
    times = f", for the {_ordinal(first.restarts)} time," if first.restarts else ""
    says = f"job {first.id} is back in the queue{times}" if first.restarts else f"job {first.id} waits"
    if first.reason:
        meaning = _REASONS.get(first.reason, "").format(id=first.id)
        says += f" for `{first.reason}`" + (f": {meaning}" if meaning else "")
    if first.starts_at is not None:
        says += f"; Slurm expects to start it {_clock_time(first.starts_at, now)}"
    if others:
        says += f"; behind it {_jobs(job.id for job in others)}"
    return RunState("requeued" if first.restarts else "pending", says)


def _unheard(facts: RunFacts, told: SlurmSnapshot) -> RunState | None:
    newest = facts.newest
    if told.no_answer_reason is None:
        return None
    if newest is not None and _is_open(newest) and newest["status"] != "killed" and _may_be_at_work(newest, facts):
        where = f"in job {newest['job']} on {newest['host']}"
        return RunState("unknown", f"{_name(newest)} began {where}, and last wrote {duration(facts.quiet_s)} ago")
    last = _last_without_attempt(facts)
    if last is not None and last.id in facts.open_jobs:
        return RunState("submitted", f"job {last.id} was submitted and has not begun, as far as the run knows")
    return None


def _in_a_job_that_is_over(facts: RunFacts, told: SlurmSnapshot) -> RunState | None:
    newest, last = facts.newest, _last_without_attempt(facts)
    if last is not None and told.no_answer_reason is None:
        return _over(last.id, facts, told, "no attempt of it began")
    if newest is None or "job" not in newest:
        return None
    id = str(newest["job"])
    if _is_open(newest):
        if told.no_answer_reason is not None and _may_be_at_work(newest, facts):
            return None
        return _over(id, facts, told, f"{_name(newest)} left no word")
    was_cancelled = id in told.jobs and told.jobs[id].state == "CANCELLED"
    if newest["status"] == "preempted" and was_cancelled:
        return RunState("cancelled", f"job {id} was cancelled; {_name(newest)} ended in order")
    return None


def _over(id: str, facts: RunFacts, told: SlurmSnapshot, left: str) -> RunState:
    """The state of a run whose last job is not there any more."""
    job, end = told.jobs.get(id), facts.last_end(id)
    if job is not None and job.state == "CANCELLED":
        return RunState("cancelled", f"job {id} was cancelled; {left}")
    if job is not None:
        code = f", exit code {job.exit_code}" if job.exit_code not in ("", "0:0") else ""
        return RunState("failed", f"job {id} ended with `{job.state}`{code}; {left}{_with_words(facts)}")
    if end is not None:
        word = _STATUS.get(end.code, "failed")
        return RunState(word, f"the script of job {id} ended with {_code(end.code)}; {left}{_with_words(facts)}")
    return RunState("lost", f"Slurm knows nothing of job {id}, and no end of it is written; {left}")


def _as_it_ended(facts: RunFacts) -> RunState | None:
    newest = facts.newest
    if newest is None:
        return None
    if _is_open(newest) and newest["status"] != "killed":
        return RunState("unknown", f"{_name(newest)} is {newest['status']}; it wrote {duration(facts.quiet_s)} ago")
    return _ended(newest, facts)


def _ended(attempt: Mapping[str, Any], facts: RunFacts) -> RunState:
    """How an attempt ended, as its journal has it."""
    status = str(attempt["status"])
    if status in _SAYS:
        return RunState(status, _SAYS[status].format(attempt=_name(attempt)))
    return RunState(status, f"{_name(attempt)} ended with {_code(int(attempt['exit_code']))}{_with_words(facts)}")


def _with_what_is_unknown(state: RunState, facts: RunFacts, told: SlurmSnapshot) -> RunState:
    if told.no_answer_reason is None or state.word in DONE or not facts.open_jobs:
        return state
    jobs = _jobs(facts.open_jobs)
    return RunState(state.word, f"{state.description}; what becomes of {jobs} is unknown: {told.no_answer_reason}")


def _last_without_attempt(facts: RunFacts) -> JobRecord | None:
    """The newest job, if it was submitted after the newest attempt ended and none began in it."""
    if not facts.jobs:
        return None
    last, newest = facts.jobs[-1], facts.newest
    if newest is None:
        return last
    began_in_it = any(str(attempt.get("job")) == last.id for attempt in facts.attempts)
    is_later = not _is_open(newest) and float(newest["ended_at"]) < last.submitted_at
    return last if is_later and not began_in_it else None


def _may_be_at_work(attempt: Mapping[str, Any], facts: RunFacts) -> bool:
    """Whether the attempt is in a job whose script has not ended since, as far as the run knows."""
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


def _with_words(facts: RunFacts) -> str:
    return f": {facts.words}" if facts.words else ""


def _jobs(ids: Iterable[str]) -> str:
    found = list(ids)
    return f"job {found[0]}" if len(found) == 1 else f"jobs {', '.join(found)}"


def _until(job: SlurmJob, now: float) -> str:
    return "" if job.ends_at is None else f", which Slurm ends {_clock_time(job.ends_at, now)}"


def _clock_time(at: float, now: float) -> str:
    """A time to come, as people of this machine's zone write it."""
    is_near = abs(at - now) < 12 * 3600
    there = time.strftime("at %H:%M" if is_near else "on %Y-%m-%d at %H:%M", time.localtime(at))
    return f"{there} (in {duration(at - now)})" if at >= now + 1 else f"{there}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
