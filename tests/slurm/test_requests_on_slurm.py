"""Requests that a real cluster cannot meet are refused before its queue, and Slurm would accept the proposed ones."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppoctl.core.errors import SlurmError
from ppoctl.core.finding import Finding
from ppoctl.recipe.loading.load import Loaded
from ppoctl.start.slurm.request import request_findings
from ppoctl.start.slurm.slurm_client import Slurm
from slurm.lab import Lab
from slurm.test_requests import recipe, script_of

CONFIGURATION = "Requested node configuration is not available"
Case = tuple[int, str, str, str]
"""Devices of the layout, the table `[slurm]`, the first finding, and the values that Slurm takes instead."""
REFUSED: dict[str, Case] = {
    "nodes on CPUs": (5, "nodes=5", "`slurm.nodes` is `5`, but partition `main` has 2 such", "nodes=2"),
    "nodes that follow": (
        2,
        "gpus_per_node=1, partition='small'",
        "the layout's 2 GPUs require 2 nodes of `1`, but partition `small` has 1 such",
        "gpus_per_node=2",
    ),
    "too large a layout": (6, "gpus_per_node=2", "has 2 such for a job: a layout of at most 4 GPUs would fit", ""),
    "partition": (1, "partition='mian'", "invalid partition specified: mian", "partition=main"),
    "drained partition": (1, "partition='drained'", "it is `drain`", "partition="),
    "GPUs": (2, "gpus_per_node=3", "has `3` GPUs; the most is 2", "gpus_per_node=2"),
    "a type of GPUs": (2, "gpus_per_node=2, gpu_type='a100'", "its GPUs have no types: leave the key out", ""),
    "CPUs": (1, "cpus_per_node=5", "has `5` CPUs; the most is 4", "cpus_per_node=4"),
    "memory": (1, "memory='1T'", "has `1T` of memory; the most is 4000M", "memory=4000M"),
    "constraint": (
        1,
        "constraint='fastt'",
        "no node of partition `main` has `fastt`; its nodes have `fast`",
        "constraint=fast",
    ),
    "node": (1, "options={nodelist='node9'}", "`sbatch` refused: Invalid node name specified", ""),
}
ACCEPTED: dict[str, Case] = {
    "idle nodes": (4, "nodes=5, gpus_per_node=2", "the others would be idle", "nodes=2"),
    "nodes of a layout": (4, "nodes=1, gpus_per_node=2", "are 2 GPUs", "nodes=2"),
    "closed partition": (1, "partition='closed'", "it is `down`", "partition=main"),
    "time": (
        1,
        "time='2:00:00', partition='small'",
        "longer than that of partition `small`, `1:00:00`",
        "time=1:00:00",
    ),
    "warning": (1, "warn_s=600", "of partition `main` is 600 s", "time=20"),
    "several": (
        4,
        "nodes=5, gpus_per_node=3, memory='1T', time='2:00:00', partition='small'",
        "the others would be idle",
        "time=1:00:00 --set slurm.gpus_per_node=2 --set slurm.memory=4000M --set slurm.partition=main",
    ),
}
"""Slurm accepts these if the site does not enforce limits; the job would wait forever, or lose work."""


def findings(loaded: Loaded, slurm: Slurm) -> list[Finding]:
    return request_findings(loaded, slurm, script_of)


@pytest.fixture(scope="module", params=["NO", "ALL"])
def slurm(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """The lab with more partitions and a feature, at a site that does not enforce limits, and at one that does."""
    configuration = lab.configuration
    lab.reconfigure(f"{configuration}EnforcePartLimits={request.param}\n")
    partitions = {"small": ("MaxTime=60", "MaxNodes=1"), "closed": ("State=DOWN",), "drained": ("State=DRAIN",)}
    for name, settings in partitions.items():
        lab.run_program("scontrol", "create", f"PartitionName={name}", "Nodes=ALL", *settings)
    nodes = f"NodeName={','.join(lab.nodes)}"
    lab.run_program("scontrol", "update", nodes, "AvailableFeatures=fast", "ActiveFeatures=fast")
    yield Slurm(lab.environ)
    lab.run_program("scontrol", "update", nodes, "AvailableFeatures=", "ActiveFeatures=")
    for name in partitions:
        lab.run_program("scontrol", "delete", f"PartitionName={name}")
    lab.reconfigure(configuration)


FIRST = {"NO": REFUSED, "ALL": ACCEPTED}


@pytest.mark.parametrize(
    ("slurm", "data", "table", "says", "nearest"),
    [
        pytest.param(
            site, *case, id=f"{site}-{name}", marks=[] if name in first else [pytest.mark.ci("the other site")]
        )
        for site, first in FIRST.items()
        for name, case in (REFUSED | ACCEPTED).items()
    ],
    indirect=["slurm"],
    scope="module",  # one site for all of its cases
)
def test_real_slurm_would_take_the_nearest_suggested_request(
    slurm: Slurm, data: int, table: str, says: str, nearest: str
) -> None:
    found = findings(recipe(f"slurm={{{table}}}", data=data), slurm)
    assert says in found[0].what
    hint = str(found[0].hint)
    assert nearest in hint
    assert bool(nearest) == ("--set" in hint)
    if nearest:
        command = hint.split("`")[1]
        loaded = recipe(f"slurm={{{table}}}", *shlex.split(command)[1::2], data=data)
        assert findings(loaded, slurm) == []
        assert "to start at" in slurm.would_accept(script_of(loaded.recipe), folder=Path("/tmp"))


def test_request_waits_for_a_node_that_is_drained(lab: Lab, slurm: Slurm) -> None:
    """Slurm's answer to `--test-only` is the same as for a node that does not exist, but the node may return."""
    lab.run_program("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=repair")
    try:
        wanted = recipe("slurm={nodes=2, gpus_per_node=2, constraint='fast'}", data=4)
        with pytest.raises(SlurmError, match=CONFIGURATION):
            slurm.would_accept(script_of(wanted.recipe), folder=Path("/tmp"))
        assert findings(wanted, slurm) == []
        (missing,) = findings(recipe("slurm={gpus_per_node=2}", data=6), slurm)
        assert "has 2 such" in missing.what
        (unknown,) = findings(recipe("slurm={nodes=2, constraint='[fast*2]'}", data=2), slurm)
        assert CONFIGURATION in unknown.what
    finally:
        lab.run_program("scontrol", "update", "NodeName=node2", "State=RESUME")
        lab.wait_idle()
