"""Facts of a run's folder, and the queries to Slurm."""

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fakes.components import fake_recipe
from fakes.job import play, stop_at
from fakes.slurm import FakeSlurm
from ppoctl.core.errors import RunAliveError, SlurmError
from ppoctl.start.slurm import run_status
from ppoctl.start.slurm.run_state import RunFacts
from ppoctl.start.slurm.slurm_client import Slurm
from ppoctl.store import liveness
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.jobs import JobRecord, ScriptEnd, record
from ppoctl.store.journal import Journal, read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("played") / "run"
    play(root, fake_recipe(steps=2, cluster={"call_deadline_s": 1000, "start_deadline_s": 50}))
    return root


@pytest.fixture
def paths(played: Path, tmp_path: Path) -> RunPaths:
    shutil.copytree(played, tmp_path / "run")
    return RunPaths(tmp_path / "run")


def begun(paths: RunPaths, **where: object) -> Attempt:
    """Journal an attempt on another host that has not ended."""
    attempt = claim(paths)
    Journal(paths, attempt).event("attempt_started", **{"pid": 2**22 + 1, "host": "node1", **where})
    return attempt


def facts(paths: RunPaths) -> RunFacts:
    return run_status.facts(RecordedRun(paths), read_lines(paths.journal))


def age(path: Path, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time.time() - seconds,) * 2)


def started(number: int, pid: int, at: float) -> dict[str, object]:
    return {"event": "attempt_started", "attempt": number, "pid": pid, "host": platform.node(), "at": at}


def ended(number: int, **fields: object) -> dict[str, object]:
    return {"event": "attempt_ended", "attempt": number, "status": "failed", "exit_code": 7, "at": 9.5, **fields}


def test_attempt_is_running_while_the_process_that_started_it_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()  # until it closes
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        now, began = time.time(), psutil.Process().create_time()
        lines = [
            started(1, os.getpid(), now),
            started(2, os.getpid(), began - 5.0),  # a newer process has this pid
            started(3, child.pid, now),
            started(4, 2**22 + 1, now),  # more than Linux gives
        ]
        found = liveness.attempts(lines)
    assert [attempt["status"] for attempt in found] == ["running", "killed", "killed", "killed"]
    assert found[1]["at"] == began - 5.0


def test_attempt_has_the_end_of_its_last_line() -> None:
    lines = [ended(3), started(1, 2**22 + 1, 2.5), ended(1, until="`a` is 1"), started(2, 2**22 + 1, 8.5), ended(2)]
    first, second = liveness.attempts(lines)
    assert (first["attempt"], first["status"], first["exit_code"], first["at"], first["ended_at"]) == (
        *(1, "failed", 7),
        *(2.5, 9.5),
    )
    assert (first["until"], "until" in second) == ("`a` is 1", False)
    assert liveness.ended_early(lines[:3]) == "`a` is 1"
    assert liveness.ended_early(lines) is None, "the newest attempt decides"
    assert liveness.ended_early([]) is None


def test_unfinished_run_has_done_and_planned_steps(tmp_path: Path) -> None:
    stop_at(tmp_path / "run", "2 values starts", steps=3)
    found = facts(RunPaths(tmp_path / "run"))
    assert (found.steps_done, found.steps_planned) == (1, 3)


def test_run_facts_cover_done_steps_and_submitted_jobs(paths: RunPaths) -> None:
    begun(paths, job="12", restart=1)
    record(paths, JobRecord("12", 5.0, "resume"))
    paths.job_ended("12").write_text("0 75 7 USR1\n")
    found = facts(paths)
    assert (found.steps_done, found.steps_planned) == (2, 2)
    assert found.ends == {"12": [ScriptEnd(0, 75, 7.0, "USR1")]}
    assert found.job_ids == ("12",)
    assert found.newest is not None
    assert (found.newest["job"], found.newest["restart"], found.newest["host"]) == ("12", 1, "node1")


def test_hang_timeout_is_ten_times_longest_stage_within_bounds(paths: RunPaths) -> None:
    assert facts(paths).start_patience_s == 1000.0
    assert facts(paths).patience_s == 50.0

    def after_a_stage_of(seconds: float) -> float:
        lines = [line | ({"seconds": seconds} if "stage" in line else {}) for line in read_lines(paths.journal)]
        return run_status.facts(RecordedRun(paths), lines).patience_s

    assert [after_a_stage_of(seconds) for seconds in (4.0, 7.0, 300.0)] == [50.0, 70.0, 1000.0]


def test_quiet_time_uses_journal_console_and_job_log(paths: RunPaths) -> None:
    lines = read_lines(paths.journal)
    layout_of_now = claim(paths).number
    started = {"event": "attempt_started", "attempt": layout_of_now, "at": time.time() - 900, "pid": 1, "host": "x"}
    lines = [line | {"at": time.time() - 1000} for line in lines] + [started | {"job": "12"}]

    def quiet() -> int:
        return round(run_status.facts(RecordedRun(paths), lines).quiet_s, -1)

    assert quiet() == 900
    age(paths.job_log("12"), 300)
    assert quiet() == 300
    age(paths.console_log(layout_of_now), 40)
    assert quiet() == 40


def test_logs_of_older_attempts_and_jobs_are_neither_recent_nor_read(paths: RunPaths) -> None:
    began = time.time() - 900
    lines = [line | {"at": began - 100} for line in read_lines(paths.journal)]
    for number, job in ((7, "12"), (8, "13")):
        lines.append({"event": "attempt_started", "attempt": number, "at": began, "pid": 1, "host": "x", "job": job})
        record(paths, JobRecord(str(int(job) + 2), 5.0 + number, "resume"))  # 14, then 15
        paths.job_log(str(int(job) + 2)).parent.mkdir(exist_ok=True)
        paths.job_log(str(int(job) + 2)).write_text(f"error: of job {int(job) + 2}\n")
    lines.append({"event": "reward_tried", "attempt": 8, "at": began})
    for old in (paths.console_log(7), paths.job_log("12"), paths.job_log("14")):
        age(old, 10)
    age(paths.job_log("15"), 600)
    found = run_status.facts(RecordedRun(paths), lines)
    assert (round(found.quiet_s, -1), found.words) == (600, "of job 15")
    age(paths.job_log("13"), 400)  # of the newest attempt
    assert round(run_status.facts(RecordedRun(paths), lines).quiet_s, -1) == 400


def test_last_error_of_log_is_one_line_without_secrets(tmp_path: Path) -> None:
    log = tmp_path / "slurm-12.log"
    assert run_status.last_error(log) == ""
    log.write_text("error: an old one\nstep 1\n" + "x" * run_status.TAIL_BYTES)
    assert run_status.last_error(log) == ""
    with log.open("a") as file:
        file.write("\nerror: cannot reach `https://user:word@host/x`\n\nhint: ls\n")
    assert run_status.last_error(log) == "cannot reach `https://host/x`"
    with log.open("a") as file:
        file.write("slurmstepd: error: *** JOB 12 ON node1 CANCELLED DUE TO TIME LIMIT ***\n")
    assert run_status.last_error(log) == "*** JOB 12 ON node1 CANCELLED DUE TO TIME LIMIT ***"


def test_jobs_of_many_runs_are_queried_once(cluster: FakeSlurm) -> None:
    runs = [RunFacts(jobs=(JobRecord(id, 1.0, "resume"),)) for id in ("12", "13")]
    done = RunFacts(jobs=(JobRecord("7", 1.0, "x"), JobRecord("8", 2.0, "x")), ends={"7": [ScriptEnd(0, 0, 1.0)]})
    cluster.has("12", "RUNNING")
    cluster.has("13", "PENDING")
    snapshot = run_status.ask(Slurm(), [*runs, done])
    assert "--jobs=12,13,8 " in cluster.calls[0]
    assert [job.id for run in runs for job in (*snapshot.at_work(run), *snapshot.waiting(run))] == ["12", "13"]


def test_machine_without_slurm_has_no_answer_about_jobs() -> None:
    run = RunFacts(jobs=(JobRecord("12", 1.0, "resume"),))
    absent = run_status.ask(Slurm({"PATH": "/nowhere"}), [run])
    assert absent.no_answer_reason == "`squeue` is not installed: this machine has no Slurm"


def test_require_idle_rejects_run_with_running_job(paths: RunPaths, cluster: FakeSlurm) -> None:
    begun(paths, job="12", restart=0)
    cluster.has("12", "RUNNING", nodes="node1")
    with pytest.raises(RunAliveError, match=r"is in use: job 12 of Slurm is running") as raised:
        run_status.require_idle(paths)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f"ppoctl resume {paths.root} --take-over")
    cluster.has("12", "NODE_FAIL")
    run_status.require_idle(paths)
    cluster.forgets("12")
    run_status.require_idle(paths)


def test_require_idle_rejects_run_with_pending_job(
    paths: RunPaths, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("12", "13"):
        record(paths, JobRecord(id, float(id), "rollout"))
    cluster.has("13", "PENDING")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    for id in ("", "99"):  # a login node, and a shell in another job
        monkeypatch.setenv("SLURM_JOB_ID", id)
        with pytest.raises(RunAliveError, match="has a job in Slurm: 13 is PENDING") as raised:
            run_status.require_idle(paths)
        assert raised.value.hint is not None
        assert raised.value.hint.endswith(f"end it: ppoctl stop {paths.root}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")  # 13 waits for the end of 12
    run_status.require_idle(paths)
    cluster.has("12", "PENDING", restarts=1)
    monkeypatch.setenv("SLURM_JOB_ID", "13")  # 12 was put back into the queue by hand
    run_status.require_idle(paths)
    cluster.has("12", "RUNNING", restarts=1)
    with pytest.raises(RunAliveError, match="job 12 of Slurm is running"):
        run_status.require_idle(paths)


def test_require_idle_ignores_job_of_this_process(
    paths: RunPaths, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(paths, job="12", restart=0)
    cluster.has("12", "RUNNING")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    run_status.require_idle(paths)
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    with pytest.raises(RunAliveError, match="job 12"):
        run_status.require_idle(paths)


@pytest.mark.parametrize("inside", [False, True])
def test_unreachable_slurm_stops_user_but_not_job(
    paths: RunPaths, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    begun(paths, job="12", restart=0)
    cluster.refuses("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    if inside:
        monkeypatch.setenv("SLURM_JOB_ID", "13")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
        run_status.require_idle(paths)
        return
    with pytest.raises(SlurmError, match=r"it is unknown whether a job is running on run `.*`") as raised:
        run_status.require_idle(paths)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("--take-over")


def test_machine_without_slurm_can_take_over_run(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(paths, job="12", restart=0)
    monkeypatch.setenv("PATH", "/nowhere")
    run_status.require_idle(paths)


def test_require_idle_names_local_process_before_its_job(paths: RunPaths, cluster: FakeSlurm) -> None:
    parent = psutil.Process().parent()
    assert parent is not None
    begun(paths, job="12", restart=0, pid=parent.pid, host=platform.node())
    cluster.has("12", "RUNNING")
    with pytest.raises(RunAliveError, match=f"attempt . is process {parent.pid} on this host"):
        run_status.require_idle(paths)


def test_restarted_job_takes_over_its_earlier_attempt(
    paths: RunPaths, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = psutil.Process().parent()
    assert parent is not None
    begun(paths, job="12", restart=0, pid=parent.pid, host=platform.node())
    cluster.has("12", "RUNNING", restarts=1)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_status.require_idle(paths)
    for id, restarts in (("12", "0"), ("13", "1")):  # two shells of one job, another job of this host
        monkeypatch.setenv("SLURM_JOB_ID", id)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        with pytest.raises(RunAliveError, match="is process"):
            run_status.require_idle(paths)
