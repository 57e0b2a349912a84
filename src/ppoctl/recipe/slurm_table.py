"""The `[slurm]` table: the resources that a job requests, and the setup in its batch script. No key changes
results."""

import math
import re
from typing import Annotated, Literal

from pydantic import Field

from ppoctl.core.recipe_table import REPORTING, SPEED, Array, AtLeastOne, NotNegative, Table


class BareNodes(Table):
    """No container: the command runs directly on the node."""

    kind: Annotated[Literal["none"], SPEED]
    """No container."""


class Pyxis(Table):
    """NVIDIA's Slurm plugin Pyxis with enroot: `srun --container-image`."""

    kind: Annotated[Literal["pyxis"], SPEED]
    """A container by Pyxis and enroot."""
    image: Annotated[str, SPEED]
    """Image for `srun --container-image`: a squashfs file or `registry#name:tag`."""
    mounts: Annotated[tuple[str, ...], SPEED, Array] = ()
    """Folders to mount, `HOST:INSIDE`; the run directory, models and data must have the same paths inside."""


class Apptainer(Table):
    """Apptainer, formerly Singularity: `apptainer exec`."""

    kind: Annotated[Literal["apptainer"], SPEED]
    """A container by Apptainer."""
    image: Annotated[str, SPEED]
    """Image file (`.sif`)."""
    mounts: Annotated[tuple[str, ...], SPEED, Array] = ()
    """Folders to bind, `HOST:INSIDE`; the run directory, models and data must have the same paths inside."""


Container = Annotated[BareNodes | Pyxis | Apptainer, Field(discriminator="kind")]


class SlurmTable(Table):
    """A Slurm job (`--on slurm`): the resources that the job requests, and the setup in its batch script."""

    partition: Annotated[str | None, SPEED] = None
    """Partition (`--partition`); absent: the cluster's default."""
    account: Annotated[str | None, REPORTING] = None
    """Account that is charged (`--account`); absent: the user's default account."""
    qos: Annotated[str | None, SPEED] = None
    """Quality of service (`--qos`); absent: the cluster's default."""
    nodes: Annotated[int | None, SPEED, AtLeastOne] = None
    """Number of nodes; absent: as many as the layout requires with `gpus_per_node`, or 1 without GPUs."""
    gpus_per_node: Annotated[int | None, SPEED, AtLeastOne] = None
    """GPUs of each node (`--gpus-per-node`); absent: no GPUs are requested, and the run uses CPUs."""
    gpu_type: Annotated[str | None, SPEED] = None
    """Type of the GPUs, as listed by `sinfo --format=%G` (`--gpus-per-node=TYPE:N`); absent: any type."""
    cpus_per_node: Annotated[int | None, SPEED, AtLeastOne] = None
    """CPUs of each node (`--cpus-per-task` of one task); absent: the cluster's default."""
    memory: Annotated[str | None, SPEED] = None
    """Host memory of each node (`--mem`, such as `200G`; `0`: all memory); absent: the cluster's default."""
    time: Annotated[str | None, SPEED] = None
    """Time limit in Slurm's format (`minutes`, `HH:MM:SS` or `days-HH:MM:SS`); absent: the limit of the partition."""
    constraint: Annotated[str | None, SPEED] = None
    """Features that nodes must have (`--constraint`); absent: any node."""
    options: Annotated[dict[str, str], SPEED] = Field(default_factory=dict)
    """Further options of `sbatch` by long name, such as `exclude = "node7"`; an empty text: an option without
    value."""
    warn_s: Annotated[int, SPEED, Field(ge=30)] = 300
    """Seconds before the time limit at which Slurm signals the job (`--signal=B:USR1@...`), so that the run can
    save."""
    requeue: Annotated[bool, SPEED] = True
    """Whether the job is requeued after the time limit, a preemption or a node failure (`--requeue`)."""
    requeues: Annotated[int, SPEED, NotNegative] = 100
    """Maximum number of times that a job is requeued."""
    container: Container = BareNodes(kind="none")
    """Container of the command."""
    setup: Annotated[tuple[str, ...], SPEED, Array] = ()
    """Shell lines that run before the command, such as `module load cuda`."""
    environment: Annotated[dict[str, str], SPEED] = Field(default_factory=dict)
    """Environment variables of the command. Secrets belong in the file that `secrets` names."""
    pass_on: Annotated[tuple[str, ...], SPEED, Array] = ()
    """Names of variables that are passed from the submitting shell to the job, in addition to HOME and PATH."""
    secrets: Annotated[str | None, SPEED] = None
    """Shell file (mode 600, outside the run directory) that exports secrets on the node, such as an MLflow token;
    absent: none."""
    command: Annotated[str | None, SPEED] = None
    """Command that starts `ppoctl` on a node; absent: the full path of the submitting `ppoctl`."""


_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", re.ASCII)
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_MIB = {"K": 2**-10, "": 1, "M": 1, "G": 2**10, "T": 2**20}
_FILE = re.compile(r"[/~$.].*|.*\.(?:sqsh|squashfs|sif|simg|img)", re.DOTALL)


def limit_s(text: str) -> float:
    """Return the seconds of a time limit in one of Slurm's forms; infinity for no limit (`UNLIMITED`, `0`).

    The forms are `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes` and
    `days-hours:minutes:seconds`. Raises ValueError for any other text.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"`{text}` is not a time limit")
    parts = [int(part) for part in match[2].split(":")]
    begins_with_hours = match[1] is not None or len(parts) == 3
    units = (3600, 60, 1) if begins_with_hours else (60, 1)
    total = 86400.0 * int(match[1] or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))
    return total or math.inf


def memory_mib(text: str) -> float:
    """Return the MiB of an amount of memory in Slurm's form (`200G`); a number without a unit is in MiB.

    Raises ValueError for any other text.
    """
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(f"`{text}` is not an amount of memory")
    return int(match[1]) * _MIB[match[2].upper()]


def is_image_file(image: str) -> bool:
    """Whether a container image is a file rather than a name in a registry (`docker://...`, `nvcr.io#nvidia/...`)."""
    return _FILE.fullmatch(image) is not None and "://" not in image
