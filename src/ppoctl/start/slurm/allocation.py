"""The Slurm job that this process runs in, if any."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ppoctl.start.slurm.slurm_client import Slurm, SlurmAwayError


@dataclass(frozen=True)
class Allocation:
    """Nodes that Slurm has allocated to the job of this process."""

    id: str
    """Id of the job."""
    restarts: int
    """Number of requeues of the job so far."""
    nodes: str
    """Slurm's list of the nodes, such as `node[1-2]`."""
    node_count: int
    node: str
    """Slurm's name of the node that this process is on."""
    slurm: Slurm

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes. The script runs on the first one. Raises SlurmError."""
        return tuple(self.slurm.hosts(self.nodes))

    @cached_property
    def ends_at(self) -> float | None:
        """Time at which Slurm ends the job, in unix seconds; None: there is no limit, or Slurm does not answer."""
        try:
            job = self.slurm.job(self.id)
        except SlurmAwayError:
            return None
        return None if job is None else job.ends_at


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the job that this process runs in; None: it does not run in a job."""
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
