"""`ppoctl status` and `ppoctl stop` of runs in jobs, as a person meets them: a Slurm that is a folder of programs."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fakes.job import play
from fakes.slurm import FakeSlurm
from fakes.sockets import fake_recipe
from ppoctl.cli.app import run
from ppoctl.store.attempt import claim
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.journal import Journal
from ppoctl.store.layout import RunLayout


class Said(NamedTuple):
    code: int
    out: str
    err: str


Ask = Callable[..., Said]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("played") / "my"
    play(root, fake_recipe(steps=1))
    return root


@pytest.fixture
def layout(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """The run `my` in the present folder."""
    shutil.copytree(played, tmp_path / "my")
    monkeypatch.chdir(tmp_path)
    return RunLayout(Path("my"))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    found = FakeSlurm(tmp_path / "slurm")
    found.use(monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return found


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def asked(*words: object) -> Said:
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return asked


def submitted(layout: RunLayout, id: str = "12", after: str | None = None) -> None:
    record(layout, JobRecord(id, time.time(), "resume", after=after))


def begun(layout: RunLayout, **where: object) -> Journal:
    """The journal of an attempt on a node of the cluster."""
    journal = Journal(layout, claim(layout))
    journal.event("attempt_started", **{"pid": 2**22 + 1, "host": "node1", **where})
    return journal


def test_a_run_in_the_queue(layout: RunLayout, cluster: FakeSlurm, ask: Ask) -> None:
    submitted(layout)
    cluster.has("12", "PENDING", reason="Resources")
    said = ask("status", "my")
    assert said.code == 0
    assert said.out.splitlines()[:3] == ["my: pending", "job 12 waits for `Resources`", ""]
    assert [line for line in said.out.splitlines() if line.startswith(("steps", "attempts", "jobs"))] == [
        "steps        1 of 1",
        "attempts     none",
        "jobs         12 pending",
    ]
    assert said.err == "stop it: ppoctl stop my\n"


def test_a_run_at_work_in_a_job(layout: RunLayout, cluster: FakeSlurm, ask: Ask) -> None:
    submitted(layout)
    begun(layout, job="12", restart=0)
    cluster.has("12", "RUNNING", nodes="node[1-2]", start="1795403470")
    lines = ask("status", "my").out.splitlines()
    assert lines[0] == "my: running"
    assert lines[1].startswith("attempt 2 is at work in job 12 on node[1-2]; it last wrote 0.")
    assert "attempts     2 running" in lines
    cluster.has("12", "NODE_FAIL")
    assert "attempts     2 killed" in ask("status", "my").out.splitlines()
    cluster.goes_away()
    assert "attempts     2 running or killed on node1" in ask("status", "my", "--wait", "0.1").out.splitlines()


def test_everything_is_in_the_one_object(layout: RunLayout, cluster: FakeSlurm, ask: Ask) -> None:
    submitted(layout)
    submitted(layout, "13", after="12")
    begun(layout, job="12", restart=0).event("attempt_ended", status="preempted", exit_code=75)
    layout.job_ended("12").write_text("0 75 7 USR1\n")
    cluster.has("12", "PENDING", reason="BeginTime", restarts=1, start="4102444800")
    cluster.has("13", "PENDING", reason="Dependency")
    told = json.loads(ask("status", "my", "--json").out)
    assert (told["state"], told["slurm_silent"]) == ("requeued", None)
    assert told["says"].startswith("job 12 is back in the queue, for the 1st time, for `BeginTime`: ")
    first, second = told["jobs"]
    assert {key: first[key] for key in ("id", "state", "reason", "restarts", "starts_at", "ends")} == {
        "id": "12",
        "state": "PENDING",
        "reason": "BeginTime",
        "restarts": 1,
        "starts_at": 4102444800.0,
        "ends": [{"restart": 0, "exit_code": 75, "at": 7.0}],
    }
    assert (second["id"], second["after"]) == ("13", "12")
    assert told["attempts"][-1]["job"] == "12"


def test_a_controller_that_is_away_is_waited_for_shortly(layout: RunLayout, cluster: FakeSlurm, ask: Ask) -> None:
    submitted(layout)
    cluster.goes_away()
    said = ask("status", "my", "--wait", "0.1")
    assert said.out.splitlines()[:2] == [
        "my: submitted",
        "job 12 was submitted and has not begun, as far as the run knows; what becomes of job 12 is unknown: "
        "`squeue` gave no answer within 0.1 s",
    ]
    assert said.err == "ask again, with more time for Slurm: ppoctl status my --wait 20\n"
    assert "within 0.5 s" in ask("status", "my").out


def test_the_words_of_a_job_that_failed_reach_no_terminal_as_a_command(
    layout: RunLayout, cluster: FakeSlurm, ask: Ask
) -> None:
    submitted(layout)
    cluster.has("12", "FAILED", status="2048")
    layout.job_log("12").write_text("error: no \x1b]0;owned\x07 disk\n")
    said = ask("status", "my")
    assert said.out.splitlines()[1] == (
        "job 12 ended with `FAILED`, exit code 8:0; no attempt of it began: no \\x1b]0;owned\\x07 disk"
    )
    assert said.err == "continue: ppoctl resume my\n"


def test_resume_leaves_a_run_at_work_in_a_job_alone(layout: RunLayout, cluster: FakeSlurm, ask: Ask) -> None:
    submitted(layout)
    cluster.has("12", "RUNNING", nodes="node1")
    said = ask("resume", "my")
    assert said.code == 8
    assert said.err.startswith(f"error: run `{layout.root.resolve()}` is at work: job 12 of Slurm is at work\n")
    assert "ppoctl status " in said.err
