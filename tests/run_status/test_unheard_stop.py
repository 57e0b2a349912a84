"""A run with a stop request whose job was requeued because a signal came first."""

from pathlib import Path

import pytest

from fakes.job import PPO_STEP_FUNCTIONS
from ppoctl.core.errors import InterruptedByUserError
from ppoctl.start.slurm.allocation import Allocation
from ppoctl.start.slurm.job_start import register_start
from ppoctl.start.slurm.slurm_client import Slurm
from ppoctl.store import run_dir
from ppoctl.store.attempt import claim
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.journal import Journal
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import request_stop


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Return a run whose first attempt, in job 12, was preempted after a request to stop."""
    paths = RunPaths(tmp_path / "run")
    run_dir.create(paths, recipe_toml="", resolved={"steps": 1, **PPO_STEP_FUNCTIONS}, facts={})
    for id in ("12", "13"):
        record(paths, JobRecord(id, 1.0, "resume", restarts_max=9))
    return paths


def ended(paths: RunPaths, status: str, *, job: str = "12") -> None:
    journal = Journal(paths, claim(paths))
    journal.event("attempt_started", pid=1, host="node1", job=job, restart=0)
    request_stop(paths, "stage")
    journal.event("attempt_ended", status=status, exit_code=130 if status == "interrupted" else 75)


def turn(id: str, restarts: int) -> Allocation:
    return Allocation(id, restarts, "node1", 1, "node1", Slurm({}))


def test_requeued_job_obeys_earlier_stop_request(paths: RunPaths) -> None:
    ended(paths, "preempted")
    with pytest.raises(InterruptedByUserError, match="before job 12 was requeued") as raised:
        register_start(paths, turn("12", 1))
    assert raised.value.hint == f"ppoctl resume {paths.root} --on slurm"


def test_handled_stop_request_does_not_block_later_start(paths: RunPaths) -> None:
    ended(paths, "interrupted")
    assert register_start(paths, turn("12", 1)) is None  # put back into the queue by hand


def test_job_submitted_after_stop_request_continues(paths: RunPaths) -> None:
    ended(paths, "preempted")
    assert register_start(paths, turn("13", 0)) is None


def test_stop_request_to_older_attempt_is_ignored(paths: RunPaths) -> None:
    ended(paths, "preempted")
    journal = Journal(paths, claim(paths))
    journal.event("attempt_started", pid=1, host="node1", job="12", restart=1)
    assert register_start(paths, turn("12", 2)) is None
