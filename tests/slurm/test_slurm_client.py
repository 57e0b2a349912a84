"""Slurm's programs as functions, with a real Slurm."""

import signal
import time
from pathlib import Path

import pytest

from ppoctl.core.errors import SlurmError
from ppoctl.start.slurm.slurm_client import Slurm, SlurmAwayError
from slurm.lab import Lab, wait_for_text


@pytest.fixture
def slurm(lab: Lab) -> Slurm:
    return Slurm(lab.environ)


def script(log: Path, *lines: str, **options: str) -> str:
    """Return the text of a batch script whose output goes to `log`."""
    directives = [f"#SBATCH --{name.replace('_', '-')}={value}" for name, value in options.items()]
    return "\n".join(
        ["#!/bin/sh", f'#SBATCH --output="{log}"', "#SBATCH --open-mode=append", *directives, *lines, ""]
    )


def test_client_follows_a_job_from_the_queue_to_its_end(lab: Lab, slurm: Slurm, log: Path) -> None:
    text = script(log, "pwd", "until [ -e go ]; do sleep 0.1; done", "exit 7", time="5")
    id = slurm.submit(text, folder=log.parent, options=["--hold"])
    held = slurm.job(id)
    assert held is not None
    assert (held.state, held.reason, held.is_waiting, held.nodes) == ("PENDING", "JobHeldUser", True, "")
    lab.run_program("scontrol", "release", id)
    wait_for_text(log, str(log.parent))
    works = slurm.job(id)
    assert works is not None
    assert (works.state, works.reason, works.is_at_work, works.restarts) == ("RUNNING", "", True, 0)
    assert slurm.hosts(works.nodes) in (["node1"], ["node2"])
    assert works.ends_at == works.starts_at + 300
    assert abs(works.starts_at - time.time()) < 60
    (log.parent / "go").touch()
    lab.wait_for(id, "FAILED")
    failed = slurm.job(id)
    assert failed is not None
    assert (failed.is_over, failed.reason, failed.exit_code) == (True, "NonZeroExitCode", "7:0")


def test_would_accept_submits_nothing(lab: Lab, slurm: Slurm, log: Path) -> None:
    before = lab.run_program("squeue", "-h", "--states=all")
    says = slurm.would_accept(script(log, "true", nodes="2"), folder=log.parent)
    assert "to start at" in says
    assert "node[1-2]" in says
    assert lab.run_program("squeue", "-h", "--states=all") == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "gpu"}, "invalid partition specified: gpu"),
        ({"gpus_per_node": "3"}, "Requested node configuration is not available"),
        ({"cpus_per_task": "5"}, "Requested node configuration is not available"),
        ({"no_such_option": "1"}, "unrecognized option '--no-such-option=1'"),
    ],
)
def test_refused_job_has_the_message_of_slurm(slurm: Slurm, log: Path, options: dict[str, str], says: str) -> None:
    for call in (slurm.submit, slurm.would_accept):
        with pytest.raises(SlurmError, match=says):
            call(script(log, "true", **options), folder=log.parent)


def test_request_for_too_many_nodes_is_refused_by_would_accept(lab: Lab, slurm: Slurm, log: Path) -> None:
    job_script = script(log, "true", nodes="5")
    with pytest.raises(SlurmError, match="Requested node configuration is not available"):
        slurm.would_accept(job_script, folder=log.parent)
    id = slurm.submit(job_script, folder=log.parent)
    waits = slurm.job(id)
    assert waits is not None
    # Slurm gives the second reason until its scheduler has looked at the job.
    assert waits.reason in ("PartitionConfig", "PartitionNodeLimit")
    slurm.cancel(id)
    assert lab.wait_for(id, "CANCELLED")


def test_signal_reaches_the_script_and_requeue_counts_restarts(lab: Lab, slurm: Slurm, log: Path) -> None:
    lines = ("trap 'echo told' USR1", "echo ready ${SLURM_RESTART_COUNT:-0}", "while :; do sleep 0.1; done")
    id = slurm.submit(script(log, *lines), folder=log.parent)
    wait_for_text(log, "ready 0")
    slurm.signal(id, "USR1")
    wait_for_text(log, "told")
    slurm.requeue(id)
    waits = slurm.job(id)
    assert waits is not None
    assert waits.is_waiting or waits.is_at_work
    wait_for_text(log, "ready 1")
    again = slurm.job(id)
    assert again is not None
    assert (again.is_at_work, again.restarts) == (True, 1)
    slurm.cancel(id)
    lab.wait_for(id, "CANCELLED")
    over = slurm.job(id)
    assert over is not None
    assert over.is_over
    slurm.signal(id, "USR1")  # the script has ended: no error


def test_job_name_that_looks_like_output_is_not_parsed(slurm: Slurm, log: Path) -> None:
    words = "x|JobState=FAILED Reason=no ExitCode=9:9 | FAILED|"
    id = slurm.submit(script(log, "true"), folder=log.parent, options=[f"--job-name={words}", f"--comment={words}"])
    until = time.monotonic() + 30
    while (done := slurm.job(id)) is not None and not done.is_over and time.monotonic() < until:
        time.sleep(0.05)
    assert done is not None
    assert (done.state, done.reason, done.exit_code) == ("COMPLETED", "", "0:0")


def test_unknown_job_is_none_without_accounting(slurm: Slurm) -> None:
    assert slurm.job("987654") is None


def test_stopped_controller_gives_unknown_within_the_deadline(lab: Lab, log: Path) -> None:
    hasty = log.with_name("slurm.conf")
    for name in ("gres.conf", "cgroup.conf"):
        log.with_name(name).write_text((lab.folder / name).read_text())
    hasty.write_text(lab.configuration.replace("MessageTimeout=10", "MessageTimeout=2"))
    lab.kill("slurmctld", signal.SIGTERM)
    try:
        begun = time.monotonic()
        with pytest.raises(SlurmAwayError, match=r"did not answer within 0\.5 s"):
            Slurm(lab.environ, deadline_s=0.5).job("1")
        assert time.monotonic() - begun < 20
        away = Slurm({**lab.environ, "SLURM_CONF": str(hasty)}, deadline_s=60)
        job_script = script(log, "true")
        for call in (
            lambda: away.job("1"),
            lambda: away.submit(job_script, folder=log.parent),
            lambda: away.cancel("1"),
        ):
            with pytest.raises(SlurmAwayError, match="controller does not answer"):
                call()
    finally:
        lab.start("slurmctld")
        lab.wait_idle()
