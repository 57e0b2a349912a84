"""Requests that a real cluster cannot meet are refused before its queue; Slurm would accept the proposed one."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppoctl.errors import RecipeError
from ppoctl.slurm.client import Slurm
from ppoctl.slurm.request import require_request
from ppoctl.slurm.script import Work, batch_script
from slurm.lab import Lab
from slurm.test_requests import recipe

CASES: list[tuple[str, int, tuple[str, ...], str, str]] = [
    ("nodes", 4, ("slurm.nodes=5", "slurm.gpus_per_node=2"), "the others would be idle", "nodes=2"),
    ("nodes on CPUs", 5, ("slurm.nodes=5",), "partition `main` has 2 such", "nodes=2"),
    ("nodes of a layout", 4, ("slurm.nodes=1", "slurm.gpus_per_node=2"), "are 2 GPUs", "nodes=2"),
    (
        "nodes that follow",
        2,
        ("slurm.gpus_per_node=1", "slurm.partition=small"),
        "gives 1 to one job",
        "gpus_per_node=2",
    ),
    ("too large a layout", 6, ("slurm.gpus_per_node=2",), "a layout of at most 4 GPUs would fit", ""),
    ("partition", 1, ("slurm.partition=mian",), "no partition `mian`", "partition=main"),
    ("closed partition", 1, ("slurm.partition=closed",), "it is `down`", "partition="),
    ("GPUs", 2, ("slurm.gpus_per_node=3",), "the most is 2", "gpus_per_node=2"),
    ("CPUs", 1, ("slurm.cpus_per_node=5",), "the most is 4", "cpus_per_node=4"),
    ("memory", 1, ("slurm.memory=1T",), "the most is 4000M", "memory=4000M"),
    ("time", 1, ("slurm.time=2:00:00", "slurm.partition=small"), "longer than that of", "time=1:00:00"),
    ("warning", 1, ("slurm.warn_s=600",), "the default time limit of partition `main` is 600 s", "time=20"),
    ("constraint", 1, ("slurm.constraint=fastt",), "no node of partition `main` has `fastt`", "constraint=fast"),
]


@pytest.fixture(scope="module")
def slurm(lab: Lab) -> Iterator[Slurm]:
    """The lab with a small partition, a closed one, and a feature."""
    lab.run_program("scontrol", "create", "PartitionName=small", "Nodes=ALL", "MaxTime=60", "MaxNodes=1")
    lab.run_program("scontrol", "create", "PartitionName=closed", "Nodes=ALL", "State=DOWN")
    lab.run_program(
        "scontrol", "update", f"NodeName={','.join(lab.nodes)}", "AvailableFeatures=fast", "ActiveFeatures=fast"
    )
    yield Slurm(lab.environ)
    lab.run_program("scontrol", "update", f"NodeName={','.join(lab.nodes)}", "AvailableFeatures=", "ActiveFeatures=")
    for name in ("small", "closed"):
        lab.run_program("scontrol", "delete", f"PartitionName={name}")


@pytest.mark.parametrize(("data", "sets", "says", "nearest"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_real_slurm_would_take_the_nearest_suggested_request(
    slurm: Slurm, tmp_path: Path, data: int, sets: tuple[str, ...], says: str, nearest: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        require_request(recipe(*sets, data=data), slurm)
    assert says in caught.value.message
    assert nearest in str(caught.value.hint)
    if nearest:
        [command] = [part for part in str(caught.value.hint).split("`") if part.startswith("--set")]
        loaded = recipe(*sets, *shlex.split(command)[1::2], data=data)
        job_request = require_request(loaded, slurm)
        work = Work(("resume", "run"), tmp_path, "%j.log", is_run=True)
        assert "to start at" in slurm.would_accept(
            batch_script(loaded.recipe, job_request, work, ["ppoctl"]), folder=tmp_path
        )
