"""The `[slurm]` table: what a job asks of a cluster, and how its script makes the machine ready. No key of it changes
a result."""

import math
import re
from typing import Annotated, Literal

from pydantic import Field

from ppoctl.recipe_table import REPORTING, SPEED, Array, AtLeastOne, NotNegative, Table


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
    gpu_type: Annotated[str | None, SPEED] = None
    """Type of the GPUs, as `sinfo --format=%G` names it (`--gpus-per-node=TYPE:N`); absent: any."""
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
    container: Container = BareNodes(kind="none")
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


_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", re.ASCII)
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_MIB = {"K": 2**-10, "": 1, "M": 1, "G": 2**10, "T": 2**20}
_FILE = re.compile(r"[/~$.].*|.*\.(?:sqsh|squashfs|sif|simg|img)", re.DOTALL)


def limit_s(text: str) -> float:
    """Seconds of a time limit in one of Slurm's forms: `minutes`, `minutes:seconds`, `hours:minutes:seconds`,
    `days-hours`, `days-hours:minutes`, `days-hours:minutes:seconds`; infinity where there is none (`UNLIMITED`, `0`).
    Raises ValueError for any other text."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"`{text}` is no time limit")
    parts = [int(part) for part in found[2].split(":")]
    begins_with_hours = found[1] is not None or len(parts) == 3
    units = (3600, 60, 1) if begins_with_hours else (60, 1)
    total = 86400.0 * int(found[1] or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))
    return total or math.inf


def memory_mib(text: str) -> float:
    """MiB of an amount of memory in Slurm's form, `200G`; without a unit it counts MiB. Raises ValueError for any
    other text."""
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise ValueError(f"`{text}` is no amount of memory")
    return int(found[1]) * _MIB[found[2].upper()]


def is_image_file(image: str) -> bool:
    """Whether a container's image is a file, and not a name in a registry (`docker://...`, `nvcr.io#nvidia/...`)."""
    return _FILE.fullmatch(image) is not None and "://" not in image
