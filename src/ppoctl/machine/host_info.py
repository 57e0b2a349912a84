"""What is read of a machine, once. Checks judge this and nothing else, but for disks and ports, which they try."""

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

from ppoctl.machine import device, nvml

UNLIMITED = resource.RLIM_INFINITY
_UNREADABLE = (OSError, ValueError, metadata.PackageNotFoundError)
_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([\d.]+)'", re.MULTILINE)


@dataclass(frozen=True)
class TorchBuild:
    """The wheel of torch that is installed."""

    version: str
    cuda: str | None
    """Version of CUDA that it was built for; None: for CPUs."""


@dataclass(frozen=True)
class HostInfo:
    """A machine, as far as the checks ask."""

    driver: nvml.Driver | nvml.NoDriver
    torch: TorchBuild | None
    """None: not installed."""
    view: Callable[[], device.CudaView]
    """What torch finds, which takes its import: asked only where there are GPUs."""
    requires: tuple[str, ...]
    """What ppoctl requires, as its wheel says it; empty where it is not installed."""
    versions: Mapping[str, str]
    """Versions of installed packages, by name."""
    limits: Mapping[str, int]
    """Soft limits of a process by the letter of `ulimit`, in its numbers."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Paths of commands that were found, by name."""
    has_python_header: bool = True
    shared_memory: Path = Path("/dev/shm")
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[nvml.Gpu, ...]:
        """GPUs that a process of this shell may use."""
        return device.visible(self.driver, self.environ)

    @property
    def gpu_count(self) -> int:
        """Number of GPUs of the machine, whichever this shell may use."""
        return len(self.driver.gpus) if isinstance(self.driver, nvml.Driver) else 0

    @property
    def hides_gpus(self) -> bool:
        """Whether this shell wants no GPU."""
        return device.hides_all(self.environ.get(device.VISIBLE))


def this_machine() -> HostInfo:
    """The machine of this process."""
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
    """Versions by name. A folder whose metadata is gone, as a killed installation leaves it, is no package."""
    found = {}
    for package in metadata.distributions():
        try:
            told = package.metadata
        except _UNREADABLE:
            continue
        if told and "Name" in told and "Version" in told:
            found[_plain(told["Name"])] = told["Version"]
    return found


def _torch_build() -> TorchBuild | None:
    """The build of torch, from the file that says so: importing torch takes seconds. None where a part is missing."""
    try:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
        return TorchBuild(metadata.version("torch"), built_for(text))
    except _UNREADABLE:
        return None


def built_for(version_file: str) -> str | None:
    """Version of CUDA that torch's `version.py` says it was built for; None: for CPUs."""
    found = _CUDA.search(version_file)
    return found[1] if found else None
