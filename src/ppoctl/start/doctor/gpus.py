"""Checks of the driver, the CUDA build of torch, and the GPUs."""

from collections.abc import Iterator

from ppoctl.core.errors import quoted
from ppoctl.core.finding import Finding, ok, warning, wrong
from ppoctl.core.machine import nvml
from ppoctl.core.machine.device import VISIBLE, gpu_expected
from ppoctl.core.machine.host_info import HostInfo
from ppoctl.start.preflight import resource_checks

NONE = "no GPU"
DRIVERS = {12: 525, 13: 580}
"""Major version of CUDA -> oldest driver that supports all minor versions of this major version."""
OLDEST = {12: (5, 0), 13: (7, 5)}
"""Major version of CUDA -> oldest compute capability that the wheels of torch support."""
BFLOAT16 = (8, 0)
"""Oldest compute capability with fast bfloat16."""
IN_USE_BYTES = 2 << 30
"""Limit for the used memory of a free GPU. The driver alone uses less; above it, another process uses the GPU."""
INSTALL = "make setup-gpu  # or, without a checkout: uv pip install --reinstall 'ppoctl[gpu]'"
INSTALL_CPU = "rm -rf .venv && make setup"
"""Command that re-creates the environment for CPUs. `make setup` alone keeps an existing environment."""


def driver(machine: HostInfo) -> Finding:
    """Check that an NVIDIA driver responds and supports the CUDA version of torch."""
    cuda, driver_info = machine.torch.cuda if machine.torch else None, machine.driver
    built = f"torch {machine.torch.version} is built for CUDA {cuda}" if machine.torch else ""
    needed = DRIVERS.get(int(cuda.split(".")[0])) if cuda else None
    fix = f"sudo ubuntu-drivers install nvidia:{needed}-server  # or your system's way; in a container: --gpus all"
    if isinstance(driver_info, nvml.NoDriver):
        if driver_info.is_broken and not machine.hides_gpus:
            fix = "sudo reboot  # the kernel module is not loaded, has another version, or lost a GPU: sudo dmesg"
            return wrong(f"installed, but it does not respond ({driver_info.reason})", "driver", fix, kind="gpu")
        if cuda is None or machine.hides_gpus:
            return ok(f"none, and not needed ({driver_info.reason})", "driver", kind="gpu")
        return wrong(f"no driver responds ({driver_info.reason}), but {built}", "driver", fix, kind="gpu")
    seen = f"{driver_info.version}, for CUDA up to {nvml.words(driver_info.cuda)}"
    if cuda is not None and int(cuda.split(".")[0]) > driver_info.cuda[0]:
        return wrong(f"{seen}, but {built}, which requires driver {needed} or later", "driver", fix, kind="gpu")
    return ok(seen, "driver", kind="gpu")


def gpus(machine: HostInfo) -> Iterator[Finding]:
    """Check which GPUs this shell may use, whether torch supports them, and whether other processes use them."""
    visible = machine.gpus
    if not visible:
        yield ok(_none(machine), "GPUs", kind="gpu")
        return
    kinds = {f"{gpu.name}{_gib(gpu.memory_bytes)}" for gpu in visible}
    shown = machine.environ.get(VISIBLE)
    restricted = "" if shown is None else f"; {VISIBLE} is `{shown}`"
    seen = f"{len(visible)}: {', '.join(sorted(kinds))}{restricted}"
    major = int(machine.torch.cuda.split(".")[0]) if machine.torch and machine.torch.cuda else None
    oldest = min(gpu.capability for gpu in visible)
    usable = [gpu.uuid for gpu in visible if major is None or gpu.capability >= OLDEST.get(major, (0, 0))]
    if len(usable) < len(visible) and major is not None:
        message = f"compute capability {nvml.words(oldest)}, but torch for CUDA {major} requires"
        suffix = "" if usable else ": no GPU that torch supports"
        # UUIDs, because CUDA and nvidia-smi number the GPUs differently.
        fix = f"export {VISIBLE}={quoted(','.join(usable))}  # without the older ones"
        on_cpus = f"{INSTALL_CPU} && export {VISIBLE}=  # computes on CPUs"
        yield wrong(
            f"{seen}; {message} {nvml.words(OLDEST[major])}{suffix}", "GPUs", fix if usable else on_cpus, kind="gpu"
        )
    elif oldest < BFLOAT16:
        yield warning(f"{seen}; compute capability {nvml.words(oldest)} has no fast bfloat16", "GPUs", kind="gpu")
    else:
        yield ok(seen, "GPUs", kind="gpu")
    used_by_others = {gpu.index: gpu.used_bytes for gpu in visible if (gpu.used_bytes or 0) > IN_USE_BYTES}
    if used_by_others:
        message = ", ".join(f"{_gib(used).strip()} of GPU {index}" for index, used in used_by_others.items())
        yield warning(
            f"used by other processes: {message}", "GPU memory", "nvidia-smi  # lists the processes", kind="gpu"
        )


def torch(machine: HostInfo) -> Finding:
    """Check that torch can use the GPUs. A run must not use CPUs by mistake, as in `device.on_gpu`."""
    if machine.torch is None:
        return wrong("not installed", "torch", INSTALL if machine.gpus else INSTALL_CPU, kind="gpu")
    built = f"{machine.torch.version}, built for {'CUDA ' + machine.torch.cuda if machine.torch.cuda else 'CPUs'}"
    if machine.hides_gpus:
        return ok(f"{built}; `{VISIBLE}` hides all GPUs: runs compute on CPUs", "torch", kind="gpu")
    expected = gpu_expected(machine.driver, machine.environ, machine.torch.cuda)
    if expected is None:
        return ok(built, "torch", kind="gpu")
    if machine.torch.cuda is None:
        fix = INSTALL if machine.gpu_count else expected.to_cpu
        return wrong(f"{built}, but {expected.description}", "torch", fix, kind="gpu")
    view = machine.view()
    if view.gpus == 0:
        fix = f"unset {VISIBLE}" if VISIBLE in machine.environ else "python -c 'import torch; torch.cuda.init()'"
        return wrong(f"{built}, finds no GPU, but {expected.description}: {view.reason}", "torch", fix, kind="gpu")
    return ok(f"{built}, finds {view.gpus} of {machine.gpu_count} GPUs", "torch", kind="gpu")


def compute_mode(machine: HostInfo) -> Finding:
    """Check that several processes may use a GPU, as colocated roles do."""
    if not machine.gpus:
        return ok(_none(machine), "compute mode", kind="gpu")
    return resource_checks.compute_mode(machine.gpus)


def nccl(machine: HostInfo) -> Finding:
    """Check that torch has NCCL, over which ranks on GPUs communicate."""
    if not machine.gpus:
        return ok("not needed on CPUs", "NCCL", kind="gpu")
    if machine.torch is None or machine.torch.cuda is None:
        return warning("unknown: torch for GPUs is not installed", "NCCL", kind="gpu")
    view = machine.view()
    if view.nccl is None:
        why = f": {view.reason}" if view.reason else ""
        major = machine.torch.cuda.split(".")[0]
        return wrong(
            f"torch has none{why}", "NCCL", f"uv pip install --reinstall torch nvidia-nccl-cu{major}", kind="gpu"
        )
    return ok(view.nccl, "NCCL", kind="gpu")


def peer_access(machine: HostInfo) -> Finding:
    """Check that GPUs can read each other's memory. Without it, NCCL and weight transfers go through the host."""
    if len(machine.gpus) < 2 or not isinstance(machine.driver, nvml.Driver):
        return ok("one GPU" if machine.gpus else _none(machine), "peer access", kind="gpu")
    indices = {gpu.index for gpu in machine.gpus}
    unconnected = [pair for pair in machine.driver.apart if indices.issuperset(pair)]
    if not unconnected:
        return ok(f"between all {len(machine.gpus)} GPUs", "peer access", kind="gpu")
    pairs = ", ".join(f"{first} and {second}" for first, second in unconnected[:3]) + (
        ", ..." if len(unconnected) > 3 else ""
    )
    pair_count = len(machine.gpus) * (len(machine.gpus) - 1) // 2
    message = f"none between GPUs {pairs} ({len(unconnected)} of {pair_count} pairs): transfers go through the host"
    return warning(
        message,
        "peer access",
        "nvidia-smi topo -p2p r  # a virtual machine, ACS or an IOMMU may forbid it",
        kind="gpu",
    )


def compiler(machine: HostInfo) -> Finding:
    """Check that Triton can compile its kernel launchers, which requires a C compiler and the header of Python."""
    if not machine.gpus:
        return ok("not needed on CPUs", "compiler", kind="gpu")
    c_compiler = machine.environ.get("CC") or next(
        (machine.commands[name] for name in ("cc", "gcc", "clang") if name in machine.commands), None
    )
    missing = [] if c_compiler else ["C compiler"]
    missing += [] if machine.has_python_header else ["Python.h"]
    if missing:
        return wrong(
            f"no {' and no '.join(missing)}; Triton needs both",
            "compiler",
            "sudo apt-get install gcc python3-dev",
            kind="gpu",
        )
    return ok(str(c_compiler), "compiler", kind="gpu")


def _none(machine: HostInfo) -> str:
    return (
        f"none of {machine.gpu_count} is visible: {VISIBLE} is `{machine.environ[VISIBLE]}`"
        if machine.gpu_count
        else NONE
    )


def _gib(size: int | None) -> str:
    return "" if size is None else f" {size / 2**30:.3g} GiB"
