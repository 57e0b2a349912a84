"""Choice of the device on which this process computes. Only the functions that need torch import torch."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.core.machine import nvml

if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that limits which GPUs a process sees. The user sets it, or Ray sets it for each process."""
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True)
class CudaView:
    """GPUs and NCCL as torch sees them in this process."""

    gpus: int
    nccl: str | None
    """Version of NCCL. None: torch was built without NCCL."""
    reason: str = ""
    """Reason why torch finds no GPU, as torch reports it."""


@cache
def on_gpu() -> bool:
    """Whether this process computes on a GPU. The result is computed once, without a CUDA context.

    False if this machine has no GPU, or if all GPUs are hidden on purpose (`CUDA_VISIBLE_DEVICES=`). Raises
    EnvironmentProblemError if there is a GPU that torch cannot use: the run would silently compute on CPUs.
    """
    if _finds_gpus():
        return True
    import torch

    found = nvml.look()
    expected = gpu_expected(found, os.environ, torch.version.cuda)
    if expected is None:
        return False
    wheel = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    driver = f"version {found.version}" if isinstance(found, nvml.Driver) else f"not available ({found.reason})"
    raise EnvironmentProblemError(
        f"{expected.description}, but torch `{torch.__version__}`, built for {wheel}, cannot use it: "
        f"{why_no_gpu()}; NVIDIA driver: {driver}. To compute on CPUs anyway: `{expected.to_cpu}`",
        hint="ppoctl doctor" if torch.version.cuda else f"make setup-gpu  # or on CPUs: {expected.to_cpu}",
    )


@dataclass(frozen=True)
class Expected:
    """Reason why a process is expected to compute on a GPU."""

    description: str
    to_cpu: str = f"export {VISIBLE}="
    """Command that switches the process to CPUs."""


def gpu_expected(
    found: nvml.Driver | nvml.NoDriver, environ: Mapping[str, str], built_for: str | None
) -> Expected | None:
    """Return why a process with this environment should compute on a GPU. None: there is no GPU, or all GPUs are
    hidden.

    `built_for`: CUDA version of the process's torch. A GPU that only the kernel lists is a reason only if torch was
    built for CUDA: in a container without GPUs, the kernel also lists the GPUs of the host.
    """
    shown, gpus = environ.get(VISIBLE), found.gpus if isinstance(found, nvml.Driver) else ()
    if hides_all(shown):
        return None
    if gpus:
        return Expected(f"this machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)}")
    if isinstance(found, nvml.NoDriver) and found.is_broken:
        return Expected("this machine has an NVIDIA driver that is broken")
    if built_for is not None and nvml.in_kernel():
        return Expected("this machine has a GPU that is hidden from this process")
    if shown is not None:
        return Expected(f"this process was given GPU `{shown}` (`{VISIBLE}`)", f"unset {VISIBLE}")
    return None


def this_device() -> "torch.device":
    """Return the device of this process: the current GPU, or the CPU. Raises the errors of `on_gpu`."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def hides_all(shown: str | None) -> bool:
    """Whether this value of `CUDA_VISIBLE_DEVICES` hides every GPU, by the rules of CUDA and torch."""
    return shown is not None and shown.strip() in ("", "-1", "NoDevFiles")


def visible(found: nvml.Driver | nvml.NoDriver, environ: Mapping[str, str]) -> tuple[nvml.Gpu, ...]:
    """Return the GPUs that a process with this environment may use, by CUDA's rules for `CUDA_VISIBLE_DEVICES`: its
    entries are indices or prefixes of UUIDs, and CUDA reads them up to the first entry that is neither.

    Index 0 is the fastest GPU unless `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set. CUDA does not document how it ranks GPUs,
    so this function sorts them by compute capability. If a MIG device is listed, all GPUs are returned, because NVML
    does not report to which GPU the MIG device belongs.
    """
    gpus, shown = found.gpus if isinstance(found, nvml.Driver) else (), environ.get(VISIBLE)
    if shown is None or "MIG-" in shown:
        return gpus
    order = gpus
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        order = tuple(sorted(gpus, key=lambda gpu: gpu.capability, reverse=True))
    chosen: list[nvml.Gpu] = []
    for word in map(str.strip, shown.split(",")):
        named = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        named += order[int(word) :][:1] if word.isdecimal() else ()
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)


def seen_by_torch() -> CudaView:
    """Return what torch sees in this process. If torch cannot be imported, the view has no GPUs. Creates no CUDA
    context."""
    try:
        import torch
        import torch.cuda.nccl
    except (ImportError, OSError) as error:
        return CudaView(0, None, _first_line(error))
    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = nvml.words(torch.cuda.nccl.version()[:3])  # type: ignore[no-untyped-call]
    if not _finds_gpus():
        return CudaView(0, nccl, why_no_gpu())
    return CudaView(torch.cuda.device_count(), nccl)


def why_no_gpu() -> str:
    """Return torch's own message about why it cannot use a GPU."""
    import torch

    try:
        with _quiet():
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return "torch gives no reason"


def _finds_gpus() -> bool:
    """Whether CUDA itself reports a GPU to torch. The import of vLLM makes torch count GPUs by NVML instead, and NVML
    also counts GPUs whose driver is too old for this torch."""
    import torch

    before = os.environ.pop(_BY_NVML, None)
    try:
        with _quiet():
            return torch.cuda.is_available()
    finally:
        if before is not None:
            os.environ[_BY_NVML] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without torch's warnings: the caller raises an error about the same problem."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
