"""`ppoctl status` and `ppoctl stop` of runs in jobs, with a Slurm that is a folder of programs."""

import json
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.conftest import CliResult, RunCli
from fakes.slurm import FakeSlurm
from ppoctl.core.batch.sealed_json import sealed_line
from ppoctl.store.attempt import claim
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.journal import Journal
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import stop_requested


@pytest.fixture
def paths(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Return the run `my` in the present folder."""
    shutil.copytree(played, tmp_path / "my")
    monkeypatch.chdir(tmp_path)
    return RunPaths(Path("my"))


def submitted(paths: RunPaths, id: str = "12", after: str | None = None) -> None:
    record(paths, JobRecord(id, time.time(), "resume", after=after))


def begun(paths: RunPaths, **where: object) -> Journal:
    """Write the journal of an attempt on a node of the cluster."""
    journal = Journal(paths, claim(paths))
    journal.event("attempt_started", **{"pid": 2**22 + 1, "host": "node1", **where})
    return journal


def test_status_of_a_pending_job(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    cluster.has("12", "PENDING", reason="Resources")
    result = ask("status", "my")
    assert result.code == 0
    assert result.out.splitlines()[:3] == ["my: pending", "job 12 waits for `Resources`", ""]
    assert [line for line in result.out.splitlines() if line.startswith(("steps", "attempts", "jobs"))] == [
        "steps        1 of 1",
        "attempts     none",
        "jobs         12 pending",
    ]
    assert result.err == "stop it: ppoctl stop my\n"


def test_status_of_a_run_in_a_job(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    begun(paths, job="12", restart=0)
    cluster.has("12", "RUNNING", nodes="node[1-2]", start="1795403470")
    lines = ask("status", "my").out.splitlines()
    assert lines[0] == "my: running"
    assert lines[1].startswith("attempt 2 is running in job 12 on node[1-2]; it last wrote ")
    assert "attempts     2 running" in lines
    cluster.has("12", "NODE_FAIL")
    assert "attempts     2 killed" in ask("status", "my").out.splitlines()
    cluster.goes_away()
    assert "attempts     2 running or killed on node1" in ask("status", "my", "--wait", "0.1").out.splitlines()


def test_status_json_has_all_jobs_attempts_and_slurm_states(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    submitted(paths, "13", after="12")
    begun(paths, job="12", restart=0).event("attempt_ended", status="preempted", exit_code=75)
    paths.job_ended("12").write_text("0 75 7 USR1\n")
    cluster.has("12", "PENDING", reason="BeginTime", restarts=1, start="4102444800")
    cluster.has("13", "PENDING", reason="Dependency")
    parsed = json.loads(ask("status", "my", "--json").out)
    assert (parsed["state"], parsed["slurm_silent"]) == ("requeued", None)
    assert parsed["says"].startswith("job 12 is back in the queue, for the 1st time, for `BeginTime`: ")
    first, second = parsed["jobs"]
    assert {key: first[key] for key in ("id", "state", "reason", "restarts", "starts_at", "ends")} == {
        "id": "12",
        "state": "PENDING",
        "reason": "BeginTime",
        "restarts": 1,
        "starts_at": 4102444800.0,
        "ends": [{"restart": 0, "exit_code": 75, "at": 7.0}],
    }
    assert (second["id"], second["after"]) == ("13", "12")
    assert parsed["attempts"][-1]["job"] == "12"


def test_status_waits_only_briefly_for_an_unreachable_slurm(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    cluster.goes_away()
    result = ask("status", "my", "--wait", "0.1")
    assert result.out.splitlines()[:2] == [
        "my: submitted",
        "job 12 was submitted; the run has no record of its start; the state of job 12 is unknown: "
        "`squeue` did not answer within 0.1 s",
    ]
    assert result.err == "try again, with more time for Slurm: ppoctl status my --wait 20\n"
    assert "within 2 s" in ask("status", "my").out


def test_status_escapes_control_characters_in_job_errors(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    cluster.has("12", "FAILED", status="2048")
    paths.job_log("12").write_text("error: no \x1b]0;owned\x07 disk\n")
    result = ask("status", "my")
    assert result.out.splitlines()[1] == (
        "job 12 ended with `FAILED`, exit code 8:0; no attempt started in it: no \\x1b]0;owned\\x07 disk"
    )
    assert result.err == "continue: ppoctl resume my --on slurm\n"


def test_status_lists_each_job_with_its_end(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    for id in ("7", "8", "9"):
        submitted(paths, id)
    paths.job_ended("8").write_text("0 4 100 -\n")
    cluster.has("9", "COMPLETED")
    assert "jobs         7 unknown, 8 ended with 4, 9 completed" in ask("status", "my").out.splitlines()


def test_status_shows_the_time_use_of_each_attempt(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    for number in range(10):
        journal = begun(paths, at=1000.0 * number, gpus=4 if number == 9 else 0)
        ended = {"status": "preempted", "exit_code": 75, "starting_s": 20.0, "abandoned_s": 30.0}
        journal.event("attempt_ended", at=1000.0 * number + 90, **ended)
    lines = ask("status", "my").out.splitlines()
    first = lines.index("attempt  took     kept  starting  lost    GPU-hours kept  lost")
    assert lines[first + 1].split() == ["4", "1m", "30s", "0.0s", "20s", "30s", "0", "0"]
    assert lines[first + 8].split() == ["11", "1m", "30s", "0.0s", "20s", "30s", "0", "0.0333"]
    assert lines[first + 9].split() == ["all", "15m", "00s", "0.0s", "3m", "20s", "5m", "00s", "0", "0.0333"]
    parsed = json.loads(ask("status", "my", "--json").out)["spent"]
    assert len(parsed) == 10
    assert (parsed[0]["attempt"], parsed[0]["wall_s"], parsed[0]["lost_s"]) == (2, 90.0, 30.0)


def test_status_shows_where_the_last_step_spent_its_time(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    bare = ask("status", "my").out.splitlines()
    first = next(n for n, line in enumerate(bare) if line.startswith("stages of step 1"))
    assert bare[first].split() == ["stages", "of", "step", "1", "seconds", "tokens/s"], "fakes have no other values"
    assert [line.split("  ")[0] for line in bare[first + 1 : bare.index("", first)]] == [
        *("rollout", "reward", "values", "logprobs", "advantages", "critic_update", "actor_update", "eval"),
        *("save of the actor", "save of the critic"),
    ]
    stages: list[tuple[str, float, dict[str, float]]] = [
        ("rollout", 4.126, {"throughput/generated_tokens_per_s": 812.4, "time/transfer_s": 0.5,
                            "memory/rollout_gib": 1.5, "time/rollout_wait_s": 0.125}),
        ("reward", 0.02, {}),
        ("values", 0.5, {"throughput/values_tokens_per_s": 20500.0, "throughput/values_mfu": 0.1234,
                         "memory/values_gib": 0.75, "time/values_wait_s": 0.0}),
        ("logprobs", 1.0, {}), ("advantages", 0.001, {}), ("critic_update", 3.0, {}), ("actor_update", 60.0, {}),
    ]  # fmt: skip
    lines: list[dict[str, Any]] = [
        {"seq": 100 + n, "step": 2, "stage": stage, "seconds": s, "attempt": 1, "at": 1.0, "clocked": clocked}
        for n, (stage, s, clocked) in enumerate(stages)
    ]
    saved = {"seq": 110, "event": "saved", "step": 2, "attempt": 1, "at": 1.0, "seconds": 9.0, "waited_s": 0.333}
    with paths.journal.open("ab") as file:
        file.write(b"".join(map(sealed_line, [*lines, {**saved, "role": "critic"}])))
    shown = ask("status", "my").out.splitlines()
    first = shown.index("stages of step 2          seconds  waiting  tokens/s  MFU    peak GiB")
    assert shown[first + 1 : first + 11] == [
        "rollout                      4.13    0.125       812              1.5",
        "rollout: weight transfer      0.5",
        "reward                       0.02",
        "values                        0.5        0     20500  0.123      0.75",
        "logprobs                        1",
        "advantages                  0.001",
        "critic_update                   3",
        "actor_update                   60",
        "save of the critic          0.333",
        "",
    ]
    parsed = json.loads(ask("status", "my", "--json").out)
    assert parsed["stages"][3] == {
        "name": "values", "seconds": 0.5, "wait_s": 0.0, "tokens_per_s": 20500.0, "mfu": 0.1234, "peak_gib": 0.75
    }  # fmt: skip
    assert parsed["stages"][-1] == {
        "name": "save of the critic", "seconds": 0.333, "wait_s": None, "tokens_per_s": None, "mfu": None,
        "peak_gib": None,
    }  # fmt: skip
    assert parsed["figures"]["time/critic_save_s"] == 0.333
    assert parsed["waits"] is None, "an earlier version did not measure the generation"
    assert not [line for line in shown if "waited for" in line]


def test_status_shows_who_waited_in_the_last_step(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    """Engines generate the next step from second 1 to 4. The step scores until 2 and trains until 10. A bar has 43
    cells of 0.23 s."""
    stages: list[tuple[str, float, float, dict[str, float]]] = [
        ("reward", 2.0, 1.0, {}), ("values", 3.0, 1.0, {}), ("actor_update", 10.0, 7.0, {}),
        ("next_rollout", 10.0, 1.0, {"time/transfer_s": 1.0, "time/generation_s": 3.0}),
    ]  # fmt: skip
    lines: list[dict[str, Any]] = [
        {
            "seq": 100 + n,
            "step": 2,
            "stage": stage,
            "seconds": s,
            "attempt": 1,
            "at": 5000 + at,
            "clocked": clocked,
            **({"began_at": 5001.0} if stage == "next_rollout" else {}),
        }
        for n, (stage, at, s, clocked) in enumerate(stages)
    ]
    with paths.journal.open("ab") as file:
        file.write(b"".join(map(sealed_line, lines)))
    shown = ask("status", "my").out.splitlines()
    first = next(n for n, line in enumerate(shown) if line.startswith("step 2 in 10s"))
    assert shown[first : first + 6] == [
        f"step 2 in 10s  {'':<43}  worked  waited for",
        f"generator      {'====' + '#' * 13 + '.' * 26}  3.0s    trainer 6.0s",
        f"trainer        {'====' + '.' * 5 + '#' * 34}  8.0s    reward 1.0s",
        f"reward         {' ' * 4 + '#' * 5 + '.' * 34}  1.0s    trainer 8.0s",
        "# works  = weights are transferred  . waits",
        "The trainer is the longer side: the generator waits for it 60 % of the time. To change this, use larger "
        "microbatches (`actor.batching.max_tokens_per_microbatch`) or more ranks (`actor.parallel`).",
    ]
    assert all(len(line) <= 80 for line in shown[first : first + 5])
    found = json.loads(ask("status", "my", "--json").out)["waits"]
    assert (found["step"], found["seconds"], found["is_parallel"]) == (2, 10.0, True)
    assert [(party["name"], party["worked_s"], party["waited_s"]) for party in found["parties"]] == [
        ("generator", 3.0, {"trainer": 6.0}),
        ("trainer", 8.0, {"reward": 1.0}),
        ("reward", 1.0, {"trainer": 8.0}),
    ]
    assert found["parties"][0]["spans"] == [[0.0, 1.0, "transfer"], [1.0, 4.0, "works"], [4.0, 10.0, "trainer"]]


def test_resume_refuses_a_run_that_is_running_in_a_job(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    cluster.has("12", "RUNNING", nodes="node1")
    result = ask("resume", "my")
    assert result.code == 8
    assert result.err.startswith("error: run `my` is in use: job 12 of Slurm is running\n")
    assert "ppoctl status my" in result.err


def test_stop_requests_the_running_job_and_cancels_waiting_jobs(
    paths: RunPaths, cluster: FakeSlurm, ask: RunCli
) -> None:
    for id, after in (("12", None), ("13", "12"), ("14", "13")):
        submitted(paths, id, after)
    begun(paths, job="12", restart=0)
    cluster.has("12", "RUNNING", nodes="node1")
    cluster.has("13", "PENDING", reason="Dependency")
    cluster.has("14", "PENDING", reason="Dependency")
    result = ask("stop", "my")
    assert result == CliResult(
        0,
        """\
attempt 2 in job 12 on node1 will stop after the current stage
job 13 is cancelled
job 14 is cancelled
it will end with exit code 130; check: ppoctl status my
continue later: ppoctl resume my --on slurm
""",
        "",
    )
    assert stop_requested(paths, 2) == "stage"
    assert [call for call in cluster.calls if call.startswith("scancel")] == [
        "scancel --state=PENDING 14",
        "scancel --state=PENDING 13",
    ]


def test_stop_now_signals_the_job_after_writing_the_request(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    begun(paths, job="12", restart=0)
    cluster.has("12", "RUNNING", nodes="node1")
    parsed = json.loads(ask("stop", "my", "--after", "now", "--json").out)
    assert (parsed["asked"], parsed["after"], parsed["signalled"], parsed["cancelled"]) == (2, "now", "12", [])
    assert stop_requested(paths, 2) == "now"
    assert cluster.calls[-1] == "scancel --batch --signal=TERM 12"


def test_stop_does_not_signal_an_interactive_job(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    """For example a desktop, a notebook or an allocation: the run was not submitted as this job, which may run other
    things."""
    begun(paths, job="77", restart=0).event("attempt_ended", status="failed", exit_code=3)
    cluster.has("77", "RUNNING", nodes="node1")
    assert ask("stop", "my", "--after", "now").code == 0
    begun(paths, job="77", restart=0)
    assert ask("stop", "my", "--after", "now").code == 0
    assert not [call for call in cluster.calls if call.startswith("scancel")]
    assert stop_requested(paths, 3) == "now"


def test_stop_cancels_a_pending_job(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    cluster.has("12", "PENDING", restarts=2)
    begun(paths, job="12", restart=1).event("attempt_ended", status="preempted", exit_code=75)
    assert ask("stop", "my") == CliResult(0, "job 12 is cancelled\ncontinue later: ppoctl resume my --on slurm\n", "")
    assert cluster.state("12") == "CANCELLED"
    assert not paths.stop_request.exists()


def test_stop_cancels_a_job_that_starts_during_the_cancellation(
    paths: RunPaths, cluster: FakeSlurm, ask: RunCli
) -> None:
    submitted(paths)
    submitted(paths, "13", after="12")
    cluster.has("12", "PENDING")
    cluster.has("13", "PENDING")
    cluster.begins_when_cancelled("12", cancelled="13")
    assert ask("stop", "my").out.splitlines()[:2] == ["job 12 is cancelled", "job 13 is cancelled"]
    assert (cluster.state("12"), cluster.state("13")) == ("CANCELLED", "CANCELLED")


@pytest.mark.parametrize(("code", "state"), [(75, "CANCELLED"), (0, "COMPLETING")])
def test_stop_cancels_a_completing_job_only_if_resumable(
    paths: RunPaths, cluster: FakeSlurm, ask: RunCli, code: int, state: str
) -> None:
    submitted(paths)
    status = "preempted" if code else "finished"
    begun(paths, job="12", restart=0).event("attempt_ended", status=status, exit_code=code)
    cluster.has("12", "COMPLETING")
    assert ask("stop", "my").code == 0
    assert cluster.state("12") == state


def test_stop_of_a_local_run_does_not_query_slurm(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    parent = psutil.Process().parent()
    assert parent is not None
    begun(paths, host=platform.node(), pid=parent.pid)
    result = ask("stop", "my", "--after", "step")
    assert result.out.splitlines()[0] == (f"attempt 2 (process {parent.pid} here) will stop after the current step")
    assert stop_requested(paths, 2) == "step"
    assert cluster.calls == []


def test_stop_of_a_run_on_another_host_only_writes_the_request(
    paths: RunPaths, cluster: FakeSlurm, ask: RunCli
) -> None:
    begun(paths)
    assert ask("stop", "my", "--after", "now").out.splitlines() == [
        "attempt 2 on node1, if it is still running, will stop now: of the current stage, only finished samples are "
        "kept",
        "it will end with exit code 130; check: ppoctl status my",
        "continue later: ppoctl resume my",
    ]
    assert cluster.calls == []


def test_stop_of_a_finished_run_does_nothing_and_succeeds(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    begun(paths, job="12", restart=0)
    cluster.has("12", "NODE_FAIL")
    assert ask("stop", "my") == CliResult(
        0,
        """\
the run is neither running nor pending: failed, job 12 ended with `NODE_FAIL`; attempt 2 did not record how it ended
""",
        "",
    )
    assert not paths.stop_request.exists()


def test_stop_without_a_slurm_answer_writes_the_request(paths: RunPaths, cluster: FakeSlurm, ask: RunCli) -> None:
    submitted(paths)
    begun(paths, job="12", restart=0)
    cluster.goes_away()
    result = ask("stop", "my", "--after", "now", "--wait", "0.1")
    assert (result.code, result.err) == (0, "")
    assert stop_requested(paths, 2) == "now"
    submitted(paths, "13", after="12")
    result = ask("stop", "my", "--wait", "0.1")
    assert result.code == 3
    assert result.err == (
        "error: no job was cancelled, because Slurm did not answer about job 13 of this run: "
        "`squeue` did not answer within 0.1 s\n\nhint: on a login node: ppoctl stop my --wait 20\n"
    )
    assert stop_requested(paths, 2) == "stage"


def test_stop_cancels_nothing_if_the_request_cannot_be_written(
    paths: RunPaths, cluster: FakeSlurm, ask: RunCli
) -> None:
    submitted(paths)
    submitted(paths, "13", after="12")
    begun(paths, job="12", restart=0)
    cluster.has("12", "RUNNING", nodes="node1")
    cluster.has("13", "PENDING")
    paths.stop_request.mkdir()
    assert ask("stop", "my").code == 8
    assert cluster.state("13") == "PENDING"


def test_stop_describes_its_effect_on_a_suspended_or_hung_run(
    paths: RunPaths, cluster: FakeSlurm, ask: RunCli
) -> None:
    submitted(paths)
    begun(paths, job="12", restart=0, at=time.time() - 99999)
    cluster.has("12", "RUNNING", nodes="node1")
    assert ask("stop", "my").out.splitlines()[1].endswith("; if it does not end: scancel 12")
    cluster.has("12", "SUSPENDED", nodes="node1")
    assert ask("stop", "my").out.splitlines()[1].endswith("; it ends after it is resumed: scontrol resume 12")
