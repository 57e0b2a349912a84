"""Checks of what computes: the driver, torch's build for it, and the GPUs."""

from collections.abc import Iterator

from ppoctl.doctor.finding import Finding, ok, warning, wrong
from ppoctl.errors import EnvironmentProblemError, quoted
from ppoctl.machine import nvml
from ppoctl.machine.device import VISIBLE, gpu_expected
from ppoctl.machine.host_info import HostInfo
from ppoctl.preflight.gpus import require_shareable

NONE = "no GPU here"
DRIVERS = {12: 525, 13: 580}
"""Oldest driver for each major version of CUDA: any minor version of it runs there."""
OLDEST = {12: (5, 0), 13: (7, 5)}
"""Oldest compute capability for which torch's wheels are built, by the major version of CUDA."""
BFLOAT16 = (8, 0)
IN_USE_BYTES = 2 << 30
"""Bytes in use that somebody must be using: a driver alone keeps less."""
INSTALL = "make setup-gpu  # or, without a checkout: uv pip install --reinstall 'ppoctl[gpu]'"
INSTALL_CPU = "rm -rf .venv && make setup"
"""The command that makes the environment for CPUs anew: `make setup` alone leaves one that is there."""


def driver(here: HostInfo) -> Finding:
    """Whether an NVIDIA driver answers that runs what torch was built for."""
    cuda, found = here.torch.cuda if here.torch else None, here.driver
    built = f"torch {here.torch.version} is built for CUDA {cuda}" if here.torch else ""
    needed = DRIVERS.get(int(cuda.split(".")[0])) if cuda else None
    mend = f"sudo ubuntu-drivers install nvidia:{needed}-server  # or as the system does; a container: --gpus all"
    if isinstance(found, nvml.NoDriver):
        if found.is_broken and not here.hides_gpus:
            mend = "sudo reboot  # its kernel module is not loaded, of another version, or lost a GPU: sudo dmesg"
            return wrong("driver", f"there is one, and it does not answer ({found.reason})", mend)
        if cuda is None or here.hides_gpus:
            return ok("driver", f"none, and none is needed ({found.reason})")
        return wrong("driver", f"none answers ({found.reason}), and {built}", mend)
    seen = f"{found.version}, for CUDA up to {nvml.words(found.cuda)}"
    if cuda is not None and int(cuda.split(".")[0]) > found.cuda[0]:
        return wrong("driver", f"{seen}, and {built}, which needs a driver of {needed} or later", mend)
    return ok("driver", seen)


def gpus(here: HostInfo) -> Iterator[Finding]:
    """What GPUs this shell may use, whether torch's wheel has code for them, and who else uses them."""
    found = here.gpus
    if not found:
        yield ok("GPUs", _none(here))
        return
    kinds = {f"{gpu.name}{_gib(gpu.memory_bytes)}" for gpu in found}
    shown = here.environ.get(VISIBLE)
    restricted = "" if shown is None else f"; {VISIBLE} is `{shown}`"
    seen = f"{len(found)}: {', '.join(sorted(kinds))}{restricted}"
    major = int(here.torch.cuda.split(".")[0]) if here.torch and here.torch.cuda else None
    oldest = min(gpu.capability for gpu in found)
    usable = [gpu.uuid for gpu in found if major is None or gpu.capability >= OLDEST.get(major, (0, 0))]
    if len(usable) < len(found) and major is not None:
        says = f"compute capability {nvml.words(oldest)}, and torch for CUDA {major} begins at"
        none = "" if usable else ": no GPU that torch supports"
        # By UUID: an index is another GPU to CUDA than to nvidia-smi.
        mend = f"export {VISIBLE}={quoted(','.join(usable))}  # without the older ones"
        on_cpus = f"{INSTALL_CPU} && export {VISIBLE}=  # computes on CPUs"
        yield wrong("GPUs", f"{seen}; {says} {nvml.words(OLDEST[major])}{none}", mend if usable else on_cpus)
    elif oldest < BFLOAT16:
        yield warning("GPUs", f"{seen}; compute capability {nvml.words(oldest)} has no fast bfloat16")
    else:
        yield ok("GPUs", seen)
    busy = {gpu.index: gpu.used_bytes for gpu in found if (gpu.used_bytes or 0) > IN_USE_BYTES}
    if busy:
        says = ", ".join(f"{_gib(used).strip()} of GPU {index}" for index, used in busy.items())
        yield warning("GPU memory", f"in use by others: {says}", "nvidia-smi  # names the processes")


def torch(here: HostInfo) -> Finding:
    """Whether torch reaches the GPUs. A CPU run that nobody asked for is refused, as `device.on_gpu` does."""
    if here.torch is None:
        return wrong("torch", "not installed", INSTALL if here.gpus else INSTALL_CPU)
    built = f"{here.torch.version}, built for {'CUDA ' + here.torch.cuda if here.torch.cuda else 'CPUs'}"
    if here.hides_gpus:
        return ok("torch", f"{built}; `{VISIBLE}` hides all GPUs: runs compute on CPUs")
    expected = gpu_expected(here.driver, here.environ, here.torch.cuda)
    if expected is None:
        return ok("torch", built)
    if here.torch.cuda is None:
        mend = INSTALL if here.gpu_count else expected.to_cpu
        return wrong("torch", f"{built}, and {expected.description}", mend)
    view = here.view()
    if view.gpus == 0:
        mend = f"unset {VISIBLE}" if VISIBLE in here.environ else "python -c 'import torch; torch.cuda.init()'"
        return wrong("torch", f"{built}, finds no GPU, and {expected.description}: {view.reason}", mend)
    return ok("torch", f"{built}, finds {view.gpus} of {here.gpu_count} GPUs")


def compute_mode(here: HostInfo) -> Finding:
    """Whether several processes may use a GPU, as roles that share one do."""
    if not here.gpus:
        return ok("compute mode", _none(here))
    try:
        require_shareable(here.gpus)
    except EnvironmentProblemError as error:
        return wrong("compute mode", error.message, error.hint or "")
    return ok("compute mode", nvml.SHARED)


def nccl(here: HostInfo) -> Finding:
    """Whether torch has NCCL, over which ranks on GPUs talk."""
    if not here.gpus:
        return ok("NCCL", "not needed on CPUs")
    if here.torch is None or here.torch.cuda is None:
        return warning("NCCL", "unknown: no torch for GPUs is installed")
    view = here.view()
    if view.nccl is None:
        why = f": {view.reason}" if view.reason else ""
        major = here.torch.cuda.split(".")[0]
        return wrong("NCCL", f"torch has none{why}", f"uv pip install --reinstall torch nvidia-nccl-cu{major}")
    return ok("NCCL", view.nccl)


def peer_access(here: HostInfo) -> Finding:
    """Whether GPUs read each other's memory; NCCL and weights go through the host where they do not."""
    if len(here.gpus) < 2 or not isinstance(here.driver, nvml.Driver):
        return ok("peer access", "one GPU" if here.gpus else _none(here))
    indices = {gpu.index for gpu in here.gpus}
    apart = [pair for pair in here.driver.apart if indices.issuperset(pair)]
    if not apart:
        return ok("peer access", f"between all {len(here.gpus)} GPUs")
    pairs = ", ".join(f"{one} and {other}" for one, other in apart[:3]) + (", ..." if len(apart) > 3 else "")
    pair_count = len(here.gpus) * (len(here.gpus) - 1) // 2
    says = f"none between GPUs {pairs} ({len(apart)} of {pair_count} pairs): what they exchange goes through the host"
    return warning("peer access", says, "nvidia-smi topo -p2p r  # a virtual machine, ACS or an IOMMU may forbid it")


def compiler(here: HostInfo) -> Finding:
    """Whether Triton can compile what starts its kernels: it asks for a C compiler and Python's header."""
    if not here.gpus:
        return ok("compiler", "not needed on CPUs")
    found = here.environ.get("CC") or next(
        (here.commands[name] for name in ("cc", "gcc", "clang") if name in here.commands), None
    )
    missing = [] if found else ["C compiler"]
    missing += [] if here.has_python_header else ["Python.h"]
    if missing:
        return wrong(
            "compiler", f"no {' and no '.join(missing)}; Triton needs both", "sudo apt-get install gcc python3-dev"
        )
    return ok("compiler", str(found))


def _none(here: HostInfo) -> str:
    return f"none of {here.gpu_count} is shown: {VISIBLE} is `{here.environ[VISIBLE]}`" if here.gpu_count else NONE


def _gib(size: int | None) -> str:
    return "" if size is None else f" {size / 2**30:.3g} GiB"
