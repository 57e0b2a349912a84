"""Runs that a command may begin, replace, continue or must leave alone."""

import os
import platform
import time
from pathlib import Path

import psutil
import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, new_run_dir, open_run, play, stop_at
from ppoctl.core.errors import HealthStopError, RunAliveError
from ppoctl.run.loop.steps import run
from ppoctl.run.new_run import is_replaceable, require_way
from ppoctl.store import liveness
from ppoctl.store.attempt import claim
from ppoctl.store.journal import Journal, read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths
from store.conftest import working


def started(paths: RunPaths, pid: int, *, host: str = "", at: float | None = None) -> None:
    """Journal the start of an attempt of that process, without an end."""
    journal = Journal(paths, claim(paths))
    journal.event("attempt_started", pid=pid, host=host or platform.node(), **({} if at is None else {"at": at}))


@pytest.fixture
def made(tmp_path: Path) -> RunPaths:
    return new_run_dir(tmp_path / "run", command="train")


def parent() -> psutil.Process:
    """Return a process that is alive and is not this one."""
    found = psutil.Process().parent()
    assert found is not None
    return found


def test_run_in_use_on_this_host_is_refused(made: RunPaths) -> None:
    started(made, parent().pid)
    with pytest.raises(RunAliveError, match=f"attempt 1 is process {parent().pid} on this host") as raised:
        liveness.require_idle(made)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f"ppoctl resume {made.root} --take-over")


@pytest.mark.parametrize("or_resume", [False, True])
def test_train_on_a_run_in_use_names_the_process(made: RunPaths, *, or_resume: bool) -> None:
    started(made, parent().pid)
    (made.root / "states/actor/000001").mkdir(parents=True)
    with pytest.raises(RunAliveError, match=f"attempt 1 is process {parent().pid} on this host"):
        require_way(made, or_resume=or_resume)


def test_ended_own_or_remote_attempts_do_not_block_a_start(made: RunPaths) -> None:
    started(made, os.getpid())
    started(made, parent().pid, host="another-host")
    started(made, parent().pid)
    Journal(made, working(made, 3)).event("attempt_ended", status="failed", exit_code=3)
    liveness.require_idle(made)


def test_intact_lines_of_a_damaged_journal_are_used(made: RunPaths) -> None:
    started(made, parent().pid)
    Journal(made, working(made, 1)).event("attempt_ended", status="failed", exit_code=3)
    data = bytearray(made.journal.read_bytes())
    data[-10] ^= 1  # in the second line: the end of the first attempt is unknown
    made.journal.write_bytes(data)
    with pytest.raises(RunAliveError, match="attempt 1"):
        liveness.require_idle(made)
    data[10] ^= 1
    made.journal.write_bytes(data)
    liveness.require_idle(made)


def test_missing_journal_does_not_block_a_resume(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "2 values starts", steps=3, checkpoint={"every_steps": 1})
    layout.journal.unlink()
    liveness.require_idle(layout)


def test_reused_process_id_does_not_count_as_the_attempt(made: RunPaths) -> None:
    started(made, parent().pid, at=parent().create_time() - 60)
    liveness.require_idle(made)
    (attempt,) = liveness.attempts(read_lines(made.journal))
    assert attempt["status"] == "killed"


def test_failed_start_leaves_the_run_name_free(made: RunPaths) -> None:
    journal = Journal(made, claim(made))
    journal.event("attempt_started", pid=2**22 + 1, host=platform.node())
    assert is_replaceable(made)
    started(made, parent().pid, at=time.time())
    with pytest.raises(RunAliveError):
        is_replaceable(made)


def test_begun_run_or_foreign_folder_is_never_replaced(tmp_path: Path) -> None:
    began = stop_at(tmp_path / "began", "1 reward starts")
    assert RecordedRun(began).has_begun()
    assert not is_replaceable(began)
    failed = stop_at(tmp_path / "failed", "1 rollout starts")
    assert not RecordedRun(failed).has_begun()
    assert is_replaceable(failed)
    retired = RunPaths(tmp_path / "whole")
    play(retired.root, fake_recipe(steps=4, checkpoint={"keep_last": 2, "keep_rollouts_every_steps": 0}))
    assert not is_replaceable(retired)
    (tmp_path / "mine").mkdir()
    assert not is_replaceable(RunPaths(tmp_path / "mine"))


def test_health_stop_hint_names_the_last_healthy_checkpoint(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    play(root, fake_recipe(steps=2))
    rules = {"entropy": {"max": -1.0, "from_step": 3, "action": "stop"}}
    with pytest.raises(HealthStopError) as raised:
        run(open_run(root, fake_recipe(steps=4, health=rules), Witness()).job)
    assert raised.value.hint is not None
    assert f"ppoctl resume {root} --back-to 2" in raised.value.hint
    plan = plan_resume(RecordedRun(RunPaths(root)))
    assert plan.start == 3
    assert plan.notes == (
        "a health rule stopped the run at step 3; it continues from the states of that step",
        "to continue from the last healthy states instead, and drop all later results: "
        f"ppoctl resume {root} --back-to 2",
    )
