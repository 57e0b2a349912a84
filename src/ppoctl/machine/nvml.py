"""What NVIDIA's management library says of this machine's GPUs. Light: it needs no CUDA, takes no memory of a GPU,
and says the same whatever torch was built for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

_COMPUTE_MODES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
"""Words of `nvidia-smi` by NVML's numbers."""
_READ = 0
"""NVML's number for reading in the memory of another GPU; a comma makes its Python constant a tuple."""
SHARED = "DEFAULT"
"""The compute mode in which several processes may use a GPU."""
_KERNEL = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine. None stands for what it does not tell."""

    index: int
    """Place in the order of `nvidia-smi`, which is that of the PCI bus; CUDA's may be another."""
    uuid: str
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    compute_mode: str
    capability: tuple[int, int]
    """Compute capability, as (9, 0) of an H100."""


@dataclass(frozen=True)
class Driver:
    """An NVIDIA driver and its GPUs, in the order of `nvidia-smi`."""

    version: str
    cuda: tuple[int, int]
    """Newest CUDA that programs may be built for."""
    gpus: tuple[Gpu, ...]
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs that cannot read each other's memory."""


@dataclass(frozen=True)
class NoDriver:
    """No NVIDIA driver answers."""

    reason: str
    is_broken: bool = False
    """Whether there is one: its library answers with an error, as after an update or where a GPU is lost."""


@dataclass(frozen=True)
class Load:
    """How busy one GPU is. None stands for what it does not tell."""

    index: int
    busy_percent: float | None
    """Share of the last moments in which something ran on it."""
    used_bytes: int | None


def look() -> Driver | NoDriver:
    """The driver of this machine with its GPUs, whichever of them this process may use."""
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
    """How busy each GPU of this machine is now; none where no driver answers."""
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
    """Whether the kernel knows a GPU, whatever the library says: a container sees those of its host."""
    return any(chain(_KERNEL.glob("*"), _DEVICES.glob("nvidia[0-9]*")))


def words(cuda: tuple[int, ...]) -> str:
    """A version of CUDA, or a compute capability, as it is written: `13.0`."""
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
    memory = _if_told(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    mode = _if_told(pynvml, lambda: pynvml.nvmlDeviceGetComputeMode(handle)) or 0
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
    rates = _if_told(pynvml, lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    memory = _if_told(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return Load(index, None if rates is None else float(rates.gpu), None if memory is None else int(memory.used))


def _apart(pynvml: Any, handles: Sequence[Any]) -> list[tuple[int, int]]:
    def can_read(one: Any, other: Any) -> bool:
        status = _if_told(pynvml, lambda: pynvml.nvmlDeviceGetP2PStatus(one, other, _READ))
        return status is None or bool(status == pynvml.NVML_P2P_STATUS_OK)

    pairs = combinations(range(len(handles)), 2)
    return [(one, other) for one, other in pairs if not can_read(handles[one], handles[other])]


def _if_told(pynvml: Any, ask: Callable[[], Any]) -> Any:
    """What a GPU answers; None where it does not tell (the memory of a Grace, anything of a virtual GPU)."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None
