"""The state of a run, by every row of the table: the run's records compared with Slurm's."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from ppoctl.start.slurm.run_state import RunFacts, SlurmSnapshot, run_state
from ppoctl.start.slurm.slurm_client import SlurmJob
from ppoctl.store.jobs import JobRecord, ScriptEnd

NOW = 1_000_000.0
SILENT = "`squeue` did not answer within 2 s"


def attempt(number: int = 1, status: str = "running or killed on node1", **fields: Any) -> dict[str, Any]:
    return {"attempt": number, "status": status, "pid": 77, "host": "node1", "at": NOW - 500, **fields}


def ended(number: int = 1, status: str = "preempted", code: int = 75, **fields: Any) -> dict[str, Any]:
    return attempt(number, status, exit_code=code, ended_at=NOW - 50, **fields)


def in_job(restart: int = 0, id: str = "12") -> dict[str, Any]:
    return {"job": id, "restart": restart}


JOB = JobRecord("12", NOW - 600, "resume", restarts_max=100)
NEXT = JobRecord("13", NOW - 600, "resume", after="12")
LATER = JobRecord("20", NOW - 10, "resume")


def facts(*attempts: dict[str, Any], jobs: tuple[JobRecord, ...] = (JOB,), **fields: Any) -> RunFacts:
    quiet = {"quiet_s": 5.0, "patience_s": 600.0, "start_patience_s": 3600.0, "steps_done": 3, "steps_planned": 9}
    return RunFacts(attempts, jobs, **{**quiet, **fields})


def slurm(*jobs: SlurmJob) -> SlurmSnapshot:
    return SlurmSnapshot({job.id: job for job in jobs})


def job(state: str = "RUNNING", id: str = "12", **fields: Any) -> SlurmJob:
    nodes = "node[1-2]" if state in ("RUNNING", "SUSPENDED", "COMPLETING") else ""
    return SlurmJob(id, state, **{"nodes": nodes, "starts_at": NOW - 400.0 if nodes else None, **fields})


class Case(NamedTuple):
    name: str
    facts: RunFacts
    slurm: SlurmSnapshot
    word: str
    says: str
    """Part of the description."""


UNSUBMITTED = facts(jobs=())
NO_JOBS = SlurmSnapshot()
NO_ANSWER = SlurmSnapshot(no_answer_reason=SILENT)
CASES = [
    Case("nothing", UNSUBMITTED, NO_JOBS, "created", "the run has not started"),
    # Without a job.
    Case("alive here", facts(attempt(status="running"), jobs=()), NO_JOBS, "running",
         "attempt 1 is running as process 77"),
    Case("silent here", facts(attempt(status="running"), jobs=(), quiet_s=601.0), NO_JOBS, "hung",
         "nothing for 10m 01s"),
    Case("killed here", facts(attempt(status="killed"), jobs=()), NO_JOBS, "killed",
         "attempt 1 ended without reporting an error"),
    Case("elsewhere", facts(attempt(), jobs=()), NO_JOBS, "unknown",
         "running or killed on node1; it last wrote 5.0s ago"),
    Case("failed", facts(ended(status="failed", code=7), words="out of memory", jobs=()), NO_JOBS, "failed",
         "attempt 1 ended with exit code 7 (memory): out of memory"),
    Case("finished", facts(ended(status="finished", code=0), jobs=()), NO_JOBS, "finished", "all steps are done"),
    Case("unmet", facts(ended(status="unmet", code=5), jobs=()), NO_JOBS, "unmet",
         "but the run does not meet `[expect]`"),
    Case("ended early", facts(ended(status="finished", code=0, until="`a` is 1 (at least 1)"), jobs=()), NO_JOBS,
         "finished", "`[until]` ended the run after step 3: `a` is 1 (at least 1)"),
    Case("ended early, unmet", facts(ended(status="unmet", code=5, until="`a` is 1 (at least 1)"), jobs=()), NO_JOBS,
         "unmet", "`a` is 1 (at least 1), but the run does not meet `[expect]`"),
    Case("failed after an early end", facts(ended(until="`a` is 1"), ended(2, status="failed", code=7), jobs=()),
         NO_JOBS, "failed", "attempt 2 ended with exit code 7 (memory)"),
    Case("short", facts(ended(status="short", code=9), jobs=()), NO_JOBS, "short",
         "attempt 1 ended cleanly before the"),
    Case("health", facts(ended(status="stopped", code=5), jobs=()), NO_JOBS, "stopped", "a check stopped attempt 1"),
    Case("superseded", facts(ended(status="superseded", code=8), jobs=()), NO_JOBS, "superseded",
         "attempt 1 was superseded by a newer attempt"),
    Case("by hand", facts(ended(status="interrupted", code=130), jobs=()), NO_JOBS, "interrupted",
         "`ppoctl stop` or Ctrl-C"),
    # In the queue.
    Case("waits", facts(), slurm(job("PENDING", reason="Resources", starts_at=NOW + 90)), "pending",
         "job 12 waits for `Resources`; Slurm expects to start it at "),
    Case("waits, unknown when", facts(), slurm(job("PENDING", reason="Priority")), "pending",
         "job 12 waits for `Priority`"),
    Case("never starts", facts(), slurm(job("PENDING", reason="DependencyNeverSatisfied")), "pending",
         "it never starts"),
    Case("held", facts(), slurm(job("PENDING", reason="JobHeldUser")), "pending", "(scontrol release 12)"),
    Case("chain waits", facts(jobs=(JOB, NEXT)), slurm(job("PENDING"), job("PENDING", "13")), "pending",
         "job 12 waits; after it: job 13"),
    Case("next link waits", facts(ended(**in_job()), jobs=(JOB, NEXT), ends={"12": [ScriptEnd(0, 75, NOW)]}),
         slurm(job("TIMEOUT"), job("PENDING", "13")), "pending", "job 13 waits"),
    Case("requeued", facts(ended(**in_job())), slurm(job("PENDING", restarts=2, reason="BeginTime")), "requeued",
         "job 12 is back in the queue, for the 2nd time, for `BeginTime`: Slurm delays its start"),
    Case("requeued often", facts(ended(**in_job())), slurm(job("PENDING", restarts=111)), "requeued",
         "the 111th time"),
    Case("requeued very often", facts(ended(**in_job())), slurm(job("PENDING", restarts=121)), "requeued",
         "the 121st time"),
    Case("requeued after a kill", facts(attempt(**in_job())), slurm(job("PENDING", restarts=1)), "requeued",
         "the 1st time"),
    # Running.
    Case("starting", facts(), slurm(job()), "starting",
         "job 12 on node[1-2] started 6m 40s ago; its attempt has not started yet"),
    Case("starting again", facts(ended(**in_job())), slurm(job(restarts=1)), "starting",
         "its attempt has not started yet"),
    Case("about to be late", facts(quiet_s=99999.0), slurm(job(starts_at=NOW - 3600)), "starting",
         "its attempt has not started yet"),
    Case("never began", facts(quiet_s=99999.0), slurm(job(starts_at=NOW - 3601)), "hung",
         "but no attempt started in it"),
    Case("in a job", facts(attempt(**in_job())), slurm(job(ends_at=NOW + 7200)), "running",
         "attempt 1 is running in job 12 on node[1-2], which Slurm ends at "),
    Case("silent in a job", facts(attempt(**in_job()), quiet_s=700.0), slurm(job()), "hung",
         "wrote nothing for 11m 40s"),
    Case("at work by a later Slurm's word", facts(attempt(**in_job())), slurm(job("EXPEDITING")), "running",
         "in job 12"),
    Case("suspended", facts(attempt(**in_job()), quiet_s=99999.0), slurm(job("SUSPENDED")), "suspended",
         "are paused"),
    Case("ends", facts(ended(**in_job())), slurm(job("COMPLETING")), "preempted",
         "ended cleanly; job 12 is ending"),
    Case("dead in a live job", facts(attempt(status="killed", **in_job())), slurm(job()), "killed",
         "node[1-2] still runs"),
    Case("second link at work", facts(ended(**in_job()), attempt(2, **in_job(id="13")), jobs=(JOB, NEXT)),
         slurm(job("TIMEOUT"), job(id="13")), "running", "attempt 2 is running in job 13"),
    Case("a job that only an attempt names", facts(attempt(**in_job()), jobs=()), slurm(job()), "running",
         "in job 12"),
    Case("done before the chain", facts(ended(status="finished", code=0, **in_job()), jobs=(JOB, NEXT)),
         slurm(job("COMPLETED"), job("PENDING", "13")), "finished", "all steps are done"),
    # Ended, according to Slurm.
    Case("cancelled before it began", facts(), slurm(job("CANCELLED")), "cancelled",
         "job 12 was cancelled; no attempt started in it"),
    Case("cancelled at work", facts(attempt(**in_job())), slurm(job("CANCELLED")), "cancelled",
         "attempt 1 did not record how it ended"),
    Case("cancelled in order", facts(ended(**in_job())), slurm(job("CANCELLED")), "cancelled",
         "attempt 1 ended cleanly"),
    Case("in order before the time limit", facts(ended(**in_job())), slurm(job("TIMEOUT")), "preempted",
         "attempt 1 received a signal to stop, and ended cleanly"),
    Case("time limit in start-up", facts(words="*** JOB 12 CANCELLED DUE TO TIME LIMIT ***"),
         slurm(job("TIMEOUT", exit_code="0:15")), "failed",
         "job 12 ended with `TIMEOUT`, exit code 0:15; no attempt started in it: *** JOB 12 CANCELLED DUE TO TIME"),
    Case("killed in a job", facts(attempt(**in_job())), slurm(job("NODE_FAIL")), "failed",
         "`NODE_FAIL`; attempt 1 did not record how"),
    Case("failed in a job", facts(ended(status="failed", code=4, **in_job()), words="no rows"),
         slurm(job("FAILED", exit_code="4:0")), "failed", "attempt 1 ended with exit code 4 (data): no rows"),
    Case("a later job never began", facts(ended(status="failed", code=4, **in_job()), jobs=(JOB, LATER)),
         slurm(job("FAILED", "20", exit_code="8:0")), "failed", "job 20 ended with `FAILED`, exit code 8:0; no"),
    # Forgotten by Slurm.
    Case("forgotten, an end written", facts(attempt(**in_job()), ends={"12": [ScriptEnd(0, 137, NOW)]}), slurm(),
         "failed",
         "the script of job 12 ended with exit code 137 (signal 9); attempt 1 did not record how it ended"),
    Case("forgotten, no signal", facts(attempt(**in_job()), ends={"12": [ScriptEnd(0, 128, NOW)]}), slurm(),
         "failed", "the script of job 12 ended with exit code 128; attempt 1 did not"),
    Case("forgotten, short", facts(attempt(**in_job()), ends={"12": [ScriptEnd(0, 9, NOW)]}), slurm(), "short",
         "exit code 9 (short)"),
    Case("forgotten before an attempt", facts(ends={"12": [ScriptEnd(0, 130, NOW)]}), slurm(), "interrupted",
         "(interrupted)"),
    Case("lost", facts(attempt(**in_job())), slurm(), "lost",
         "Slurm does not know job 12, and the job recorded no end"),
    Case("lost before it began", facts(), slurm(), "lost", "no attempt started in it"),
    Case("ended and forgotten", facts(ended(**in_job())), slurm(), "preempted", "received a signal to stop"),
    Case("forgotten, a late end of before", facts(attempt(**in_job()), attempt(2, **in_job(1)),
                                                  ends={"12": [ScriptEnd(0, 8, NOW)]}), slurm(), "lost",
         "the job recorded no end; attempt 2 did not record how it ended"),
    # No answer.
    Case("submitted, no answer", facts(), NO_ANSWER, "submitted",
         f"the run has no record of its start; the state of job 12 is unknown: {SILENT}"),
    Case("ended before an attempt, no answer", facts(ends={"12": [ScriptEnd(0, 130, NOW)]}), NO_ANSWER,
         "interrupted", "the script of job 12 ended with exit code 130 (interrupted); no attempt started in it"),
    Case("elsewhere, no answer", facts(attempt(), jobs=()), NO_ANSWER, "unknown",
         "running or killed on node1; it last wrote 5.0s ago"),
    Case("at work, no answer", facts(attempt(**in_job())), NO_ANSWER, "unknown",
         "attempt 1 started in job 12 on node1, and last wrote 5.0s ago; the state of job 12 is unknown"),
    Case("alive here, no answer", facts(attempt(status="running", **in_job())), NO_ANSWER, "running",
         SILENT),
    Case("dead here, no answer", facts(attempt(status="killed", **in_job())), NO_ANSWER, "killed", SILENT),
    Case("ended, no answer", facts(ended(**in_job()), jobs=(JOB, NEXT)), NO_ANSWER, "preempted",
         f"the state of jobs 12, 13 is unknown: {SILENT}"),
    Case("finished, no answer", facts(ended(status="finished", code=0, **in_job())), NO_ANSWER, "finished",
         "all steps are done"),
    Case("killed, written, no answer", facts(attempt(**in_job()), ends={"12": [ScriptEnd(0, 1, NOW)]}),
         NO_ANSWER, "failed", "the script of job 12 ended with exit code 1 (internal)"),
    Case("a later job, no answer", facts(ended(status="failed", code=4, **in_job()), jobs=(JOB, LATER)),
         NO_ANSWER, "submitted", "job 20 was submitted"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_run_state_follows_table(case: Case) -> None:
    found = run_state(case.facts, case.slurm, now=NOW)
    assert found.word == case.word
    assert case.says in found.description
    assert ("[expect]" in found.description) == (case.word == "unmet")


def test_every_state_of_table_has_a_case() -> None:
    from ppoctl.start.slurm import run_state as module

    assert module.__doc__ is not None
    table = module.__doc__.partition("-----\n")[2]
    words = {"created", "submitted", "pending", "requeued", "starting", "running", "hung", "suspended", "killed"}
    words |= {"cancelled", "failed", "lost", "unknown", "finished", "unmet", "short", "interrupted"}
    assert all(word in table for word in words)
    assert words <= {case.word for case in CASES}


def test_expected_start_shows_time_and_duration() -> None:
    def waits_until(at: float) -> str:
        return run_state(facts(), slurm(job("PENDING", starts_at=at)), now=NOW).description

    assert waits_until(NOW + 90).endswith("(in 1m 30s)")
    assert "on 1970-01-1" in waits_until(NOW + 86400)
    assert "(in" not in waits_until(NOW - 90)  # an outdated estimate
    assert [("(in" in waits_until(NOW + soon_s)) for soon_s in (0.9, 1.0, 1.5)] == [False, True, True]
    day = [("on 1970-01-" in waits_until(NOW + hours * 3600)) for hours in (11.9, 12, 12.5)]
    assert day == [False, True, True]


def test_run_is_hung_after_quiet_time_beyond_its_timeout() -> None:
    quiet = facts(attempt(**in_job()), quiet_s=600.0)
    assert run_state(quiet, slurm(job()), now=NOW).word == "running"
    assert run_state(replace(quiet, quiet_s=600.1), slurm(job()), now=NOW).word == "hung"


def test_only_jobs_without_recorded_end_are_open() -> None:
    ends = {"12": [ScriptEnd(0, 75, 1.0), ScriptEnd(1, 0, 2.0)], "13": [ScriptEnd(0, 75, 3.0)]}
    found = facts(jobs=(JOB, NEXT, LATER), ends=ends)
    assert found.open_jobs == ("13", "20")


def test_newest_attempt_in_job_is_the_running_attempt() -> None:
    """A loop in an interactive allocation starts attempts again within the same start of the job."""
    found = facts(ended(1, "failed", 3, **in_job()), attempt(2, **in_job()), jobs=())
    newest = found.attempt_of(job())
    assert newest is not None
    assert newest["attempt"] == 2
