"""The job of Slurm that this process runs in, if it runs in one."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ppoctl.slurm.client import Slurm, SlurmAwayError


@dataclass(frozen=True)
class Allocation:
    """Nodes that Slurm has given to a job, as a process on one of them finds it."""

    id: str
    """Id of the job."""
    restarts: int
    """How often the job went back into the queue before."""
    nodes: str
    """Slurm's list of the nodes, such as `node[1-2]`."""
    node_count: int
    node: str
    """Name of the node that this process is on, as Slurm has it."""
    slurm: Slurm

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes, the first one first: there the script runs. Raises SlurmError."""
        return tuple(self.slurm.hosts(self.nodes))

    @cached_property
    def ends_at(self) -> float | None:
        """Time at which Slurm ends the job, in unix seconds; None: there is no limit, or nobody says."""
        try:
            job = self.slurm.job(self.id)
        except SlurmAwayError:
            return None
        return None if job is None else job.ends_at


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """The job that this process runs in; None: it runs in none."""
    id = environ.get("SLURM_JOB_ID")
    if not id or "SLURM_JOB_NODELIST" not in environ:
        return None
    return Allocation(
        id=id,
        restarts=int(environ.get("SLURM_RESTART_COUNT", 0)),
        nodes=environ["SLURM_JOB_NODELIST"],
        node_count=int(environ.get("SLURM_JOB_NUM_NODES", 1)),
        node=environ.get("SLURMD_NODENAME", ""),
        slurm=Slurm(environ),
    )
