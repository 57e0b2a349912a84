"""A snapshot of this machine, which is read once. The checks of `doctor` use only this snapshot, except that they
test disks and ports directly."""

import os
import re
import resource
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ppoctl.core.machine import device, nvml

UNLIMITED = resource.RLIM_INFINITY
_UNREADABLE = (OSError, ValueError, metadata.PackageNotFoundError)
_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([\d.]+)'", re.MULTILINE)


@dataclass(frozen=True)
class TorchBuild:
    """The installed build of torch."""

    version: str
    cuda: str | None
    """CUDA version that torch was built for. None: torch was built for CPUs."""


@dataclass(frozen=True)
class HostInfo:
    """Facts about a machine that the checks need."""

    driver: nvml.Driver | nvml.NoDriver
    torch: TorchBuild | None
    """The installed torch. None: torch is not installed."""
    view: Callable[[], device.CudaView]
    """Returns what torch sees. It is called only on machines with GPUs, because it imports torch."""
    requires: tuple[str, ...]
    """Requirements of ppoctl from its package metadata; empty if ppoctl is not installed."""
    versions: Mapping[str, str]
    """Versions of installed packages, by name."""
    limits: Mapping[str, int]
    """Soft resource limits of this process, by the letter of the `ulimit` option, in the units of `getrlimit`."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Paths of installed commands, by name."""
    has_python_header: bool = True
    shared_memory: Path = Path("/dev/shm")
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[nvml.Gpu, ...]:
        """GPUs that a process started by this shell may use."""
        return device.visible(self.driver, self.environ)

    @property
    def gpu_count(self) -> int:
        """Number of GPUs of the machine, including GPUs that are hidden from this shell."""
        return len(self.driver.gpus) if isinstance(self.driver, nvml.Driver) else 0

    @property
    def hides_gpus(self) -> bool:
        """Whether this shell hides all GPUs."""
        return device.hides_all(self.environ.get(device.VISIBLE))


def this_machine() -> HostInfo:
    """Return the snapshot of the machine that this process runs on."""
    return HostInfo(
        driver=nvml.look(),
        torch=_torch_build(),
        view=cache(device.seen_by_torch),
        requires=_requires(),
        versions=_versions(),
        limits={letter: _limit(letter) for letter in _LIMITS},
        commands={name: path for name in _COMMANDS if (path := shutil.which(name)) is not None},
        has_python_header=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        environ=dict(os.environ),
    )


_COMMANDS = ("cc", "gcc", "clang", "sbatch", "nvidia-smi")
_LIMITS = {
    "n": resource.RLIMIT_NOFILE,
    "l": resource.RLIMIT_MEMLOCK,
    "u": resource.RLIMIT_NPROC,
    "v": resource.RLIMIT_AS,
}


def _limit(letter: str) -> int:
    return resource.getrlimit(_LIMITS[letter])[0]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requires() -> tuple[str, ...]:
    try:
        return tuple(metadata.requires("ppoctl") or ())
    except _UNREADABLE:
        return ()


def _versions() -> dict[str, str]:
    """Return versions of installed packages by name. If `sys.path` has several of a name, Python imports the first. A
    folder without metadata, as a killed installation leaves it, is skipped."""
    found: dict[str, str] = {}
    for package in metadata.distributions():
        try:
            package_metadata = package.metadata
        except _UNREADABLE:
            continue
        if package_metadata and "Name" in package_metadata and "Version" in package_metadata:
            found.setdefault(_plain(package_metadata["Name"]), package_metadata["Version"])
    return found


def _torch_build() -> TorchBuild | None:
    """Return the build of torch. It is read from torch's version file, since importing torch takes seconds. None:
    torch is not installed completely."""
    try:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
        return TorchBuild(metadata.version("torch"), built_for(text))
    except _UNREADABLE:
        return None


def built_for(version_file: str) -> str | None:
    """Return the CUDA version in torch's `version.py`. None: torch was built for CPUs."""
    found = _CUDA.search(version_file)
    return found[1] if found else None
