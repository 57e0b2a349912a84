"""Nodes on which a run of several processes starts Ray, as its Slurm job lists them."""

import sys
from pathlib import Path

import pytest

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.engines.ray.srun import is_of_tasks
from ppoctl.run.wire.placed_processes import job_nodes
from submission.conftest import recipe_with

SCONTROL = r"""#!/bin/bash
case "$*" in
"-o show node node[1-2]")
    echo "NodeName=node2 Arch=x86_64 NodeAddr=10.0.0.2 NodeHostName=n2 Version=22.05.8 OS=Linux"
    echo "NodeName=node1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 Version=22.05.8 OS=Linux" ;;
"show hostnames node[1-2]") printf '%s\n' node1 node2 ;;
*) exit 1 ;;
esac
"""


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the environment of a job of two nodes, on the second node."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in (
        ("SLURM_JOB_ID", "7"),
        ("SLURM_JOB_NODELIST", "node[1-2]"),
        ("SLURM_JOB_NUM_NODES", "2"),
        ("SLURMD_NODENAME", "node2"),
    ):
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_job_nodes_keep_slurm_order_and_addresses():
    found = job_nodes(recipe_with())
    assert found is not None
    assert (found.job, found.here) == ("7", "node2")
    assert list(found.addresses.items()) == [("node1", "10.0.0.1"), ("node2", "10.0.0.2")]


def test_single_node_job_or_no_job_has_no_job_nodes(job):
    job.setenv("SLURM_JOB_NUM_NODES", "1")
    assert job_nodes(recipe_with()) is None
    job.delenv("SLURM_JOB_ID")
    assert job_nodes(recipe_with()) is None


def test_machine_outside_the_job_gets_a_hint_to_join_the_job(job):
    job.delenv("SLURMD_NODENAME")
    with pytest.raises(EnvironmentProblemError, match=r"is not a node of job 7 \(`node\[1-2\]`\)") as caught:
        job_nodes(recipe_with())
    assert caught.value.hint == "srun --jobid=7 --overlap --nodes=1 --ntasks=1 --nodelist=node1 ppoctl ..."


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (
            '{kind="pyxis", image="i", mounts=["/a:/a", "/b:/b"]}',
            ["--container-image=i", "--container-mounts=/tmp:/tmp,/a:/a,/b:/b", "--nodelist=node1", sys.executable],
        ),
        ('{kind="apptainer", image="/i.sif"}', ["--nodelist=node1", "apptainer", "exec", "/i.sif", sys.executable]),
    ],
)
def test_node_command_runs_in_the_container_of_the_driver(container: str, words: list[str]) -> None:
    found = job_nodes(recipe_with(f"slurm.container={container}"))
    assert found is not None
    command = found.command("node1")
    assert command[0] == "srun"
    assert command[-len(words) - 2 : -2] == words


def test_task_variables_of_a_job_are_not_passed_to_nodes():
    names = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_LABELIO", "SLURM_JOB_ID", "CPUS_PER_TASK", "HOME")
    assert [is_of_tasks(name) for name in names] == [True, True, True, False, False, False]
