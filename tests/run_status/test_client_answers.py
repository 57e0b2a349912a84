"""Output of Slurm's programs parsed into jobs, and the meaning of no output."""

import os
import time
from pathlib import Path

import pytest

from fakes.slurm import FakeSlurm
from ppoctl.core.errors import SlurmError
from ppoctl.start.slurm.slurm_client import Slurm, SlurmAbsentError, SlurmAwayError, SlurmJob


def test_job_is_read_from_controller_output(cluster: FakeSlurm) -> None:
    cluster.has("12", "PENDING", reason="Resources", start="1795407125", end="1795407725")
    cluster.has("13", "FAILED", reason="NonZeroExitCode", nodes="node[1-2]", restarts=2, status="1792", end="NONE")
    cluster.has("14", "CANCELLED", status="15")
    assert Slurm().job("12") == SlurmJob("12", "PENDING", "Resources", "", 0, "0:0", 1795407125.0, 1795407725.0)
    assert Slurm().job("13") == SlurmJob("13", "FAILED", "NonZeroExitCode", "node[1-2]", 2, "7:0", None, None)
    assert Slurm().job("14") == SlurmJob("14", "CANCELLED", exit_code="0:15")


def test_jobs_are_queried_once_and_forgotten_jobs_from_sacct(cluster: FakeSlurm) -> None:
    cluster.has("12", "RUNNING")
    cluster.accounts("13|CANCELLED by 1000|0:15|node1|1795400000|1795400009")
    found = Slurm().jobs(["12", "13", "14"])
    assert {id: job.state for id, job in found.items()} == {"12": "RUNNING", "13": "CANCELLED"}
    assert (found["13"].exit_code, found["13"].nodes, found["13"].ends_at) == ("0:15", "node1", 1795400009.0)
    assert [call.split()[0] for call in cluster.calls] == ["squeue", "sacct"]
    assert "--jobs=13,14" in cluster.calls[1]


def test_accounting_is_used_only_for_ended_jobs(cluster: FakeSlurm) -> None:
    """Accounting never records the end of a job whose controller lost its memory."""
    cluster.accounts(
        "13|RUNNING|0:0|node1|1795400000|Unknown", "14|PENDING|0:0||Unknown|Unknown", "15|TIMEOUT|0:0||1|2"
    )
    assert list(Slurm().jobs(["13", "14", "15"])) == ["15"]


def test_missing_accounting_returns_no_job(cluster: FakeSlurm) -> None:
    assert Slurm().job("99") is None
    assert Slurm().jobs(["98", "99"]) == {}
    assert Slurm().jobs([]) == {}


def test_other_squeue_refusal_raises_slurm_error(cluster: FakeSlurm) -> None:
    cluster.refuses("squeue", "squeue: error: Invalid user id")
    with pytest.raises(SlurmError, match="`squeue` refused: Invalid user id"):
        Slurm().job("12")


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
    ],
)
def test_unreachable_controller_raises_slurm_away_error(cluster: FakeSlurm, words: str) -> None:
    cluster.refuses("squeue", words)
    with pytest.raises(SlurmAwayError, match="controller does not answer"):
        Slurm().job("12")


def test_hanging_slurm_program_ends_at_deadline(cluster: FakeSlurm) -> None:
    cluster.goes_away()
    started = time.monotonic()
    with pytest.raises(SlurmAwayError, match=r"`squeue` did not answer within 0\.2 s"):
        Slurm(deadline_s=0.2).job("12")
    assert time.monotonic() - started < 10


def test_machine_without_slurm_raises_slurm_absent_error(cluster: FakeSlurm) -> None:
    with pytest.raises(SlurmAbsentError, match="`squeue` is not installed: this machine has no Slurm"):
        Slurm({"PATH": "/nowhere"}).job("12")
    cluster.refuses("squeue", "squeue: fatal: Could not establish a configuration source")
    with pytest.raises(SlurmAbsentError, match="`squeue` has no cluster configured: this machine has no Slurm"):
        Slurm().job("12")


def test_user_squeue_variables_do_not_affect_queries(cluster: FakeSlurm) -> None:
    (cluster.folder / "squeue").write_text('#!/bin/bash\nenv >"$(dirname "$0")"/env\n')
    Slurm({**os.environ, "SQUEUE_USERS": "nobody", "SQUEUE_ALL": "no", "SCANCEL_INTERACTIVE": "1"}).jobs(["1", "2"])
    seen = Path(cluster.folder / "env").read_text().splitlines()
    assert not [line for line in seen if line.startswith(("SQUEUE_", "SCANCEL_"))]
    assert "SLURM_TIME_FORMAT=%s" in seen


def test_waiting_only_cancel_spares_running_job(cluster: FakeSlurm) -> None:
    cluster.has("12", "RUNNING")
    cluster.has("13", "PENDING")
    for id in ("12", "13"):
        Slurm().cancel(id, waiting_only=True)
    assert (cluster.state("12"), cluster.state("13")) == ("RUNNING", "CANCELLED")
    Slurm().cancel("12")
    assert cluster.state("12") == "CANCELLED"
    cluster.refuses("scancel", "scancel: error: Kill job error on job id 99: Invalid job id specified")
    Slurm().cancel("99", waiting_only=True)


@pytest.mark.parametrize("words", ["scancel: error: Kill job error on job id 12: Invalid job id specified", ""])
def test_signal_does_not_reach_ended_or_completing_job(cluster: FakeSlurm, words: str) -> None:
    """`scancel` prints nothing about a job that is completing, and fails (Slurm 22.05: exit code 229)."""
    cluster.has("12", "RUNNING")
    assert Slurm().signal("12", "TERM")
    cluster.refuses("scancel", words)
    assert not Slurm().signal("12", "TERM")
    Slurm().cancel("12", waiting_only=True)
    with pytest.raises(SlurmError, match="`scancel` refused: "):
        Slurm().cancel("12")


def test_job_state_is_waiting_running_or_ended() -> None:
    def kinds(state: str) -> tuple[bool, bool, bool]:
        job = SlurmJob("1", state)
        return job.is_waiting, job.is_at_work, job.is_over

    assert kinds("PENDING") == kinds("REQUEUE_HOLD") == kinds("SPECIAL_EXIT") == (True, False, False)
    assert kinds("EXPEDITING") == kinds("A_WORD_TO_COME") == (False, True, False)
    assert kinds("RUNNING") == kinds("COMPLETING") == kinds("SUSPENDED") == (False, True, False)
    assert kinds("TIMEOUT") == kinds("CANCELLED") == kinds("NODE_FAIL") == (False, False, True)
