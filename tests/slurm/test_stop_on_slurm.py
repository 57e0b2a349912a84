"""`ppoctl status` and `ppoctl stop` of a run in jobs of a real Slurm, as typed on a login node."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fakes.job import PPO_STEP_FUNCTIONS
from ppoctl.cli.app import run
from ppoctl.start.slurm.slurm_client import Slurm
from ppoctl.store import run_dir
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.run_paths import RunPaths
from slurm.lab import Lab, wait_for_text

ATTEMPT = """
import os, sys, time
from ppoctl.start.slurm.allocation import allocation
from ppoctl.store.attempt import claim
from ppoctl.store.journal import Journal
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import stop_requested
layout, here = RunPaths(__import__("pathlib").Path(sys.argv[1])), allocation()
attempt = claim(layout)
journal = Journal(layout, attempt)
journal.event("attempt_started", pid=os.getpid(), host="elsewhere", job=here.id, restart=here.restarts)
print("begun", here.restarts, flush=True)
until = time.monotonic() + 60
while ("ONLY_SIGNALS" in os.environ or stop_requested(layout, attempt.number) is None) and time.monotonic() < until:
    time.sleep(0.05)
journal.event("attempt_ended", status="interrupted", exit_code=130)
sys.exit(130)
"""
"""An attempt that only waits for `ppoctl stop`."""


class Submitted:
    """A run that was submitted to the lab, and the output of commands about it."""

    def __init__(self, lab: Lab, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.lab, self.paths, self.capsys = lab, RunPaths(root), capsys
        resolved = {"steps": 1, "cluster": {"call_deadline_s": 600}, "expect": {}, **PPO_STEP_FUNCTIONS}
        run_dir.create(self.paths, recipe_toml="", resolved=resolved, facts={})
        (root / "attempt.py").write_text(ATTEMPT)

    def submit(self, *options: str, script: str = "", after: str | None = None) -> str:
        command = f"exec {sys.executable} {self.paths.root}/attempt.py {self.paths.root}"
        text = f"#!/bin/bash\n#SBATCH --output={self.paths.root}/logs/slurm-%j.log\n{script}\n{command}\n"
        chained = [] if after is None else [f"--dependency=afterany:{after}"]
        id = Slurm(self.lab.environ).submit(text, folder=self.paths.root, options=[*chained, *options])
        record(self.paths, JobRecord(id, time.time(), "resume", after=after))
        return id

    def begun(self, id: str, restarts: int = 0) -> None:
        wait_for_text(self.paths.job_log(id), f"begun {restarts}")

    def output(self, command: str = "status", *words: str) -> dict[str, Any]:
        assert run([command, str(self.paths.root), *words, "--wait", "10", "--json"]) == 0
        return dict(json.loads(self.capsys.readouterr().out))


@pytest.fixture
def job(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Submitted:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, lab.environ[name])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return Submitted(lab, tmp_path / "run", capsys)


def test_stop_ends_running_and_waiting_jobs_of_a_chain(lab: Lab, job: Submitted) -> None:
    first = job.submit()
    second = job.submit(after=first)
    job.begun(first)
    status = job.output()
    assert (status["state"], [each["state"] for each in status["jobs"]]) == ("running", ["RUNNING", "PENDING"])
    assert status["jobs"][1]["reason"] == "Dependency"
    stopped = job.output("stop")
    assert (stopped["asked"], stopped["cancelled"], stopped["signalled"]) == (1, [second], None)
    assert lab.wait_for(first, "FAILED")["ExitCode"] == "130:0"
    lab.wait_for(second, "CANCELLED")
    assert job.output()["state"] == "interrupted"
    assert job.output("stop")["says"][0].startswith("the run is neither running nor pending: interrupted")


def test_status_reports_every_slurm_state_of_a_job(lab: Lab, job: Submitted) -> None:
    # The attempt must not end by the request before `scancel` signals its job.
    script = '[ "$SLURM_RESTART_COUNT" ] || exec sleep 60\nexport ONLY_SIGNALS=1'
    id = job.submit("--hold", "--requeue", script=script)
    status = job.output()
    assert (status["state"], status["jobs"][0]["reason"]) == ("pending", "JobHeldUser")
    lab.run_program("scontrol", "release", id)
    lab.wait_for(id, "RUNNING")
    assert job.output()["state"] == "starting"
    Slurm(lab.environ).requeue(id)
    lab.wait_for(id, "PENDING", "RUNNING")
    assert job.output()["state"] in ("requeued", "starting", "running")
    job.begun(id, 1)
    status = job.output()
    assert (status["state"], status["attempts"][0]["restart"], status["jobs"][0]["restarts"]) == ("running", 1, 1)
    assert job.output("stop", "--after", "now")["signalled"] == id
    lab.wait_for(id, "FAILED")
    assert job.output()["state"] == "failed"


def test_stop_cancels_a_job_whose_attempt_has_not_begun(lab: Lab, job: Submitted) -> None:
    id = job.submit(script="exec sleep 60")
    lab.wait_for(id, "RUNNING")
    assert job.output("stop")["cancelled"] == [id]
    lab.wait_for(id, "CANCELLED")
    assert job.output()["state"] == "cancelled"


def test_job_unknown_to_slurm_is_lost(job: Submitted) -> None:
    record(job.paths, JobRecord("987654", time.time(), "resume"))
    assert job.output()["state"] == "lost"


def test_cancel_of_waiting_jobs_keeps_a_running_job(lab: Lab, job: Submitted) -> None:
    id = job.submit()
    job.begun(id)
    Slurm(lab.environ).cancel(id, waiting_only=True)
    assert lab.job(id)["JobState"] == "RUNNING"
    job.output("stop")
    lab.wait_for(id, "FAILED")
