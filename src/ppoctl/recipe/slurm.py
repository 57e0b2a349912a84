"""The `[slurm]` table: what a job asks of a cluster, and how its script makes the machine ready. No key of it changes
a result."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.table import REPORTING, SPEED, Array, AtLeastOne, NotNegative, Table


class BareNodes(Table):
    """The command runs on the node itself."""

    kind: Annotated[Literal["none"], SPEED]
    """No container."""


class Pyxis(Table):
    """NVIDIA's plugin of Slurm: `srun --container-image`, by enroot."""

    kind: Annotated[Literal["pyxis"], SPEED]
    """A container by Pyxis and enroot."""
    image: Annotated[str, SPEED]
    """Image, as `srun --container-image` takes it: a squashfs file or `registry#name:tag`."""
    mounts: Annotated[tuple[str, ...], SPEED, Array] = ()
    """Folders to mount, `HOST:INSIDE`; the run directory, models and data must be seen under the same paths."""


class Apptainer(Table):
    """Apptainer, formerly Singularity: `apptainer exec`."""

    kind: Annotated[Literal["apptainer"], SPEED]
    """A container by Apptainer."""
    image: Annotated[str, SPEED]
    """Image file (`.sif`)."""
    mounts: Annotated[tuple[str, ...], SPEED, Array] = ()
    """Folders to bind, `HOST:INSIDE`; the run directory, models and data must be seen under the same paths."""


Container = Annotated[BareNodes | Pyxis | Apptainer, Field(discriminator="kind")]


class SlurmTable(Table):
    """A job of Slurm (`--on slurm`): what it asks for, and how its script makes the machine ready."""

    partition: Annotated[str | None, SPEED] = None
    """Partition (`--partition`); absent: the cluster's own choice."""
    account: Annotated[str | None, REPORTING] = None
    """Account that is charged (`--account`); absent: the user's own."""
    qos: Annotated[str | None, SPEED] = None
    """Quality of service (`--qos`); absent: the cluster's own choice."""
    nodes: Annotated[int | None, SPEED, AtLeastOne] = None
    """Nodes; absent: as many as the layout's GPUs need at `gpus_per_node`, and 1 where none are asked for."""
    gpus_per_node: Annotated[int | None, SPEED, AtLeastOne] = None
    """GPUs of each node (`--gpus-per-node`); absent: none are asked for, and everything computes on CPUs."""
    cpus_per_node: Annotated[int | None, SPEED, AtLeastOne] = None
    """CPUs of each node (`--cpus-per-task` of one task); absent: the cluster's own choice."""
    memory: Annotated[str | None, SPEED] = None
    """Host memory of each node (`--mem`, such as `200G`; `0`: all of it); absent: the cluster's own choice."""
    time: Annotated[str | None, SPEED] = None
    """Time limit as Slurm writes it (`minutes`, `HH:MM:SS` or `days-HH:MM:SS`); absent: the partition's."""
    constraint: Annotated[str | None, SPEED] = None
    """Features that nodes must have (`--constraint`); absent: any node will do."""
    options: Annotated[dict[str, str], SPEED] = Field(default_factory=dict)
    """Further options of `sbatch` by their long names, such as `exclude = "node7"`; an empty text: a switch."""
    warn_s: Annotated[int, SPEED, Field(ge=30)] = 300
    """Seconds before the time limit at which the job is told (`--signal=B:USR1@...`), so that it can save."""
    requeue: Annotated[bool, SPEED] = True
    """Go back into the queue after the time limit, a preemption or a lost node (`--requeue`)."""
    requeues: Annotated[int, SPEED, NotNegative] = 100
    """Most times that one job goes back into the queue."""
    container: Annotated[Container, SPEED] = BareNodes(kind="none")
    """Container that the command runs in."""
    setup: Annotated[tuple[str, ...], SPEED, Array] = ()
    """Lines of shell before the command, such as `module load cuda`."""
    environment: Annotated[dict[str, str], SPEED] = Field(default_factory=dict)
    """Variables to set for the command; no secrets, which belong into the file of `secrets`."""
    pass_on: Annotated[tuple[str, ...], SPEED, Array] = ()
    """Names of variables that the job gets from the shell that submits it, besides HOME and PATH."""
    secrets: Annotated[str | None, SPEED] = None
    """Shell file (mode 600, outside the run) that exports secrets on the node, such as a token of MLflow; absent:
    none."""
    command: Annotated[str | None, SPEED] = None
    """Command `ppoctl` as it is called on a node; absent: the one that submits, by its full path."""
