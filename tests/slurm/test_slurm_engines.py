"""The real engines in a real Slurm, on separate hosts: a random subset, one run that is disturbed three times."""

import getpass
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from end_to_end.real_drill import outcome
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths
from slurm.drill import TABLE, Drill, row_of
from slurm.lab import Lab

COMPILED = f"/tmp/torchinductor_{getpass.getuser()}"
"""Cache of torch's compiled code, shared with later runs."""
SETTINGS = ("cluster.threads=1", "checkpoint.every_steps=2", "slurm.partition=graced")


OVER_TWO_NODES = ("cluster.threads=1", "actor.parallel={data=2}", "critic.parallel={data=2}")


def train_locally(drill: Drill, settings: Sequence[str]) -> RunPaths:
    """Train the undisturbed run, outside Slurm."""
    where = ("--runs", str(drill.folder / "whole"))
    sets = [word for text in settings for word in ("--set", text)]
    words = [sys.executable, "-m", "ppoctl", "train", str(drill.folder / "recipe.toml"), *where, *sets]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return RunPaths(drill.folder / "whole/drill")


def wait_for_commit(drill: Drill, step: int, stage: str, *, seconds: float = 300) -> None:
    """Wait until the stage is committed; the next one runs then."""
    until = time.monotonic() + seconds
    while not any((line.get("step"), line.get("stage")) == (step, stage) for line in _lines(drill.paths.journal)):
        assert time.monotonic() < until, drill.log
        time.sleep(0.02)


def _lines(journal: Path) -> list[dict[str, object]]:
    return read_lines(journal) if journal.exists() else []


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.minutes(5)
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("may_make_hosts")
def test_real_engines_survive_faults_and_leave_no_process() -> None:
    with Lab(2, kind="namespaces") as hosts:
        assert hosts.network is not None
        before = {node: hosts.network.traces(node) for node in hosts.nodes}
        drill = Drill(hosts, hosts.shared / "drill")
        whole = train_locally(drill, SETTINGS)
        id = drill.submit(*SETTINGS, engines=True)
        wait_for_commit(drill, 1, "rollout")
        hosts.run_program("scancel", "--batch", "--signal=USR1", id)
        wait_for_commit(drill, 1, "critic_update")
        urgent = hosts.submit("true", hosts.shared / "urgent.log", "-N2", "--exclusive", "--partition=urgent")
        hosts.wait_for(urgent, "COMPLETED", seconds=120)
        wait_for_commit(drill, 2, "values")
        node = hosts.job(id)["NodeList"]
        hosts.cut(node)
        assert drill.ended(seconds=600)["JobState"] == "COMPLETED", drill.log
        assert hosts.job(id)["NodeList"] != node
        hosts.restore(node)
        hosts.wait_idle(seconds=60)
        assert outcome(drill.paths.root) == outcome(whole.root)
        TABLE.append(row_of("real engines: told, pushed out, network cut", drill, whole))
        assert hosts.left(seconds=60) == []
        for node, there in before.items():
            assert set(hosts.network.traces(node)) - set(there) <= {COMPILED}


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.minutes(4)
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("may_make_hosts")
def test_two_node_run_equals_one_machine_and_leaves_no_process() -> None:
    with Lab(2, kind="namespaces", gpus=0) as hosts:
        assert hosts.network is not None
        before = {node: hosts.network.traces(node) for node in hosts.nodes}
        drill = Drill(hosts, hosts.shared / "drill")
        drill.submit(*OVER_TWO_NODES, "slurm.nodes=2", "slurm.cpus_per_node=4", engines=True)
        assert drill.ended(seconds=600)["JobState"] == "COMPLETED", drill.log
        whole = train_locally(drill, OVER_TWO_NODES)
        assert drill.paths.ledger.read_bytes() == whole.ledger.read_bytes()
        assert outcome(drill.paths.root) == outcome(whole.root)
        assert hosts.left(seconds=60) == []
        for node, there in before.items():
            assert set(hosts.network.traces(node)) - set(there) <= {COMPILED}
