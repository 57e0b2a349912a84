"""GPUs of this machine, read through NVML. NVML needs neither a CUDA context nor GPU memory, and does not depend on
the build of torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

_COMPUTE_MODES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
"""Names that `nvidia-smi` prints for NVML's compute modes, by NVML's number of the mode."""
_READ = 0
"""NVML's constant for the capability to read another GPU's memory. pynvml's constant is a tuple by mistake."""
SHARED = "DEFAULT"
"""Compute mode in which several processes may use a GPU."""
_KERNEL = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine. A field is None if the GPU does not report the value."""

    index: int
    """Index in the order of `nvidia-smi`, which is the order of the PCI bus. CUDA may use another order."""
    uuid: str
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    compute_mode: str
    capability: tuple[int, int]
    """Compute capability, e.g. (9, 0) for an H100."""


@dataclass(frozen=True)
class Driver:
    """An NVIDIA driver and its GPUs, in the order of `nvidia-smi`."""

    version: str
    cuda: tuple[int, int]
    """Newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...]
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs that cannot read each other's memory."""


@dataclass(frozen=True)
class NoDriver:
    """The result if no NVIDIA driver is available."""

    reason: str
    is_broken: bool = False
    """Whether a driver is installed, but its library returns an error, e.g. after an update or if a GPU is lost."""


@dataclass(frozen=True)
class Load:
    """The load of one GPU. A field is None if the GPU does not report the value."""

    index: int
    busy_percent: float | None
    """Percentage of the last sampling period in which a kernel ran."""
    used_bytes: int | None


def look() -> Driver | NoDriver:
    """Return the driver of this machine with all GPUs, including GPUs that this process may not use."""
    try:
        import pynvml
    except ImportError:
        return NoDriver("the package `nvidia-ml-py` is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NoDriver(str(error), is_broken=error.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    try:
        return _driver(pynvml)
    except pynvml.NVMLError as error:
        return NoDriver(str(error), is_broken=True)
    finally:
        pynvml.nvmlShutdown()


def loads() -> list[Load]:
    """Return the current load of each GPU of this machine. The list is empty if no driver is available."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_load(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def in_kernel() -> bool:
    """Whether the kernel lists a GPU. This is independent of NVML. In a container, the kernel also lists the GPUs of
    the host."""
    return any(chain(_KERNEL.glob("*"), _DEVICES.glob("nvidia[0-9]*")))


def words(cuda: tuple[int, ...]) -> str:
    """Return a CUDA version or a compute capability as text, e.g. `13.0`."""
    return ".".join(map(str, cuda))


def _driver(pynvml: Any) -> Driver:
    count = pynvml.nvmlDeviceGetCount()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    newest = pynvml.nvmlSystemGetCudaDriverVersion()
    return Driver(
        version=str(pynvml.nvmlSystemGetDriverVersion()),
        cuda=(newest // 1000, newest % 1000 // 10),
        gpus=tuple(_gpu(pynvml, index, handle) for index, handle in enumerate(handles)),
        apart=tuple(_apart(pynvml, handles)),
    )


def _gpu(pynvml: Any, index: int, handle: Any) -> Gpu:
    memory = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    mode = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetComputeMode(handle)) or 0
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        compute_mode=_COMPUTE_MODES.get(mode, str(mode)),
        capability=(int(major), int(minor)),
    )


def _load(pynvml: Any, index: int) -> Load:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    rates = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    memory = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return Load(index, None if rates is None else float(rates.gpu), None if memory is None else int(memory.used))


def _apart(pynvml: Any, handles: Sequence[Any]) -> list[tuple[int, int]]:
    def can_read(reader: Any, owner: Any) -> bool:
        status = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetP2PStatus(reader, owner, _READ))
        return status is None or bool(status == pynvml.NVML_P2P_STATUS_OK)

    pairs = combinations(range(len(handles)), 2)
    return [(first, second) for first, second in pairs if not can_read(handles[first], handles[second])]


def _or_none(pynvml: Any, query: Callable[[], Any]) -> Any:
    """Return the result of a query. None: the GPU does not support it (memory on Grace, most queries on a vGPU)."""
    try:
        return query()
    except pynvml.NVMLError:
        return None
