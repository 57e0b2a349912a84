"""The lab itself must behave as a cluster does."""

import time
from pathlib import Path

import pytest

from slurm.lab import Lab, wait_for_text


def test_lab_runs_a_job_step_with_gpus_on_each_of_two_nodes(lab: Lab, log: Path) -> None:
    id = lab.submit("srun bash -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'", log, "-N2", "--gpus-per-node=2")
    assert lab.wait_for(id, "COMPLETED")["ExitCode"] == "0:0"
    assert sorted(log.read_text().split("\n")) == ["", "node1 0,1", "node2 0,1"]
    assert lab.left() == []


def test_lab_finds_processes_left_by_a_job(lab: Lab, log: Path) -> None:
    id = lab.submit("setsid sleep 77 & sleep 0.1", log)
    lab.wait_for(id, "COMPLETED")
    lab.wait_for_processes(1)
    (left,) = lab.left(seconds=0)
    assert left.endswith("sleep 77")
    for process in lab.processes():
        process.kill()
    assert lab.left() == []


@pytest.mark.slow
def test_lab_signals_and_requeues_a_preempted_job(lab: Lab, log: Path) -> None:
    trap = "trap 'echo told' USR1; echo ready $SLURM_RESTART_COUNT; while :; do sleep 0.1; done"
    id = lab.submit(trap, log, "-N2", "--exclusive", "--partition=graced", "--signal=B:USR1@60", "--requeue")
    wait_for_text(log, "ready")
    other = lab.submit("true", log.with_name("urgent"), "-N2", "--exclusive", "--partition=urgent")
    wait_for_text(log, "told")
    lab.run_program("scontrol", "requeue", id)
    lab.wait_for(other, "COMPLETED")
    wait_for_text(log, "ready 1")
    lab.cancel_all()
    assert lab.job(id)["JobState"] == "CANCELLED"


def test_several_labs_run_at_the_same_time(lab: Lab, log: Path) -> None:
    with Lab(1, gpus=0) as other:
        id = other.submit("echo $SLURM_CONF", log)
        other.wait_for(id, "COMPLETED")
        assert log.read_text().strip() == str(other.folder / "slurm.conf")
        assert other.states() == {"node1": "idle"}
        other.kill("slurmctld")
        assert lab.states() == {"node1": "idle", "node2": "idle"}
    assert not other.folder.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("may_make_hosts")
def test_host_with_a_cut_network_loses_its_job_and_keeps_running() -> None:
    name = "echo on $(hostname) $SLURM_RESTART_COUNT; touch /tmp/mine"
    beats = f"{name}; while :; do echo >> $SLURMD_NODENAME.beats; sleep 0.1; done"
    with Lab(2, kind="namespaces") as hosts:
        assert hosts.network is not None
        before = {node: hosts.network.traces(node) for node in hosts.nodes}
        log = hosts.shared / "log"
        id = hosts.submit(beats, log, "--requeue")
        wait_for_text(log, "on node")
        first, second = ("node1", "node2") if "on node1" in log.read_text() else ("node2", "node1")
        assert set(hosts.network.traces(first)) - set(before[first]) == {"/tmp/mine"}
        assert hosts.network.traces(second) == before[second]
        hosts.cut(first)
        wait_for_text(log, f"on {second} 1", seconds=60)
        old = hosts.shared / f"{first}.beats"
        length = old.stat().st_size
        time.sleep(0.5)  # some heartbeats of the node that is cut off
        assert old.stat().st_size > length
        assert hosts.job(id)["NodeList"] == second
        assert any("slurmstepd" in line for line in hosts.left(seconds=0))
        # It ends with the job still running on both.
    assert hosts.left() == []
