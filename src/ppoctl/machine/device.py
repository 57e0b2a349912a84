"""The one place that decides what this process computes on. Light: torch is imported by whoever asks."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ppoctl.errors import EnvironmentProblemError
from ppoctl.machine import nvml

if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that shows GPUs to a process: a person sets it, or Ray for each process that it gives a GPU."""
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True)
class CudaView:
    """What torch finds in this process."""

    gpus: int
    nccl: str | None
    """Version of NCCL; None where torch has none."""
    reason: str = ""
    """Why it finds no GPU, in torch's words."""


@cache
def on_gpu() -> bool:
    """Whether this process computes on a GPU; decided once, and no CUDA context is made for it.

    False where this machine has no GPU, or none is shown on purpose (`CUDA_VISIBLE_DEVICES=`). Raises
    EnvironmentProblemError where there is a GPU that torch cannot use: it would be a CPU run that nobody asked for.
    """
    if _finds_gpus():
        return True
    import torch

    found = nvml.look()
    expected = gpu_expected(found, os.environ, torch.version.cuda)
    if expected is None:
        return False
    wheel = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    driver = f"of version {found.version}" if isinstance(found, nvml.Driver) else f"none answers ({found.reason})"
    raise EnvironmentProblemError(
        f"{expected.description}, and torch `{torch.__version__}`, built for {wheel}, cannot use it: {why_no_gpu()}; NVIDIA "
        f"driver: {driver}. To compute on CPUs all the same: `{expected.to_cpu}`",
        hint="ppoctl doctor" if torch.version.cuda else f"make setup-gpu  # or on CPUs: {expected.to_cpu}",
    )


@dataclass(frozen=True)
class Expected:
    """Why a process should compute on a GPU."""

    description: str
    to_cpu: str = f"export {VISIBLE}="
    """The command after which it is to compute on CPUs."""


def gpu_expected(
    found: nvml.Driver | nvml.NoDriver, environ: Mapping[str, str], built_for: str | None
) -> Expected | None:
    """Why a process with this environment should compute on a GPU; None where a CPU is all there is, or is asked for.

    `built_for`: the version of CUDA of its torch. A kernel that knows a GPU, which nobody lets us use, is a reason
    only for a torch that was built for it: a container without GPUs sees its host's.
    """
    shown, gpus = environ.get(VISIBLE), found.gpus if isinstance(found, nvml.Driver) else ()
    if hides_all(shown):
        return None
    if gpus:
        return Expected(f"this machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)}")
    if isinstance(found, nvml.NoDriver) and found.is_broken:
        return Expected("this machine has an NVIDIA driver that is broken")
    if built_for is not None and nvml.in_kernel():
        return Expected("this machine has a GPU that is not shown to us")
    if shown is not None:
        return Expected(f"this process was given GPU `{shown}` (`{VISIBLE}`)", f"unset {VISIBLE}")
    return None


def this_device() -> "torch.device":
    """The device of this process: the current GPU, or the CPU. Raises what `on_gpu` raises."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def hides_all(shown: str | None) -> bool:
    """Whether this value of `CUDA_VISIBLE_DEVICES` shows no GPU, as CUDA and torch read it."""
    return shown is not None and shown.strip() in ("", "-1", "NoDevFiles")


def visible(found: nvml.Driver | nvml.NoDriver, environ: Mapping[str, str]) -> tuple[nvml.Gpu, ...]:
    """The GPUs that a process with this environment may use, as CUDA reads `CUDA_VISIBLE_DEVICES`: indices or
    beginnings of UUIDs, up to the first that is neither.

    An index counts the fastest first unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`; CUDA does not say how it judges, and we
    take the compute capability. Where a part of a GPU is shown (MIG) all GPUs are: NVML does not say whose it is.
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
    """What torch finds in this process; a torch that cannot be imported finds nothing. No CUDA context is made."""
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
    """The words in which torch says why it cannot use a GPU."""
    import torch

    try:
        with _quiet():
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return "torch does not say why"


def _finds_gpus() -> bool:
    """torch's answer from CUDA itself. vLLM, when imported, has torch count what NVML sees instead, which also counts
    the GPUs of a driver that is too old for this torch."""
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
    """Context in which torch does not warn of what becomes our error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
