"""NVIDIA's management library as Python calls it, for GPUs that the test machine does not have:
`sys.modules["pynvml"]`."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

NO_LIBRARY = "NVML Shared Library Not Found"


class NVMLError(Exception):
    """Error of the library, with its number."""

    def __init__(self, says: str) -> None:
        super().__init__(says)
        self.value = 12 if says == NO_LIBRARY else 999


@dataclass
class FakeNvml:
    """A driver with GPUs of one kind; `fault`: the error that it raises on init instead."""

    count: int = 2
    driver: str = "580.65.06"
    cuda: int = 13000
    name: str = "NVIDIA H100 80GB HBM3"
    memory: tuple[int, int] | None = (80 << 30, 600 << 20)
    mode: int = 0
    capability: tuple[int, int] = (9, 0)
    first: tuple[int, int] | None = None
    """Compute capability of GPU 0, if it differs."""
    apart: set[tuple[int, int]] = field(default_factory=set)
    fault: str | None = None
    busy: dict[int, int | None] = field(default_factory=dict)
    """Utilization in percent by GPU; None: not supported."""
    NVMLError = NVMLError
    NVML_P2P_STATUS_OK = 0
    NVML_ERROR_LIBRARY_NOT_FOUND = 12

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> "FakeNvml":
        monkeypatch.setitem(sys.modules, "pynvml", self)
        return self

    def nvmlInit(self) -> None:
        if self.fault is not None:
            raise NVMLError(self.fault)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}c0ffee{handle}-0000"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.name

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if self.memory is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=self.memory[0] >> handle, used=self.memory[1])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if (gpu := self.busy.get(handle, 0)) is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=gpu)

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.mode

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.capability if self.first is None or handle > 0 else self.first

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        assert kind == 0, "reading"
        return 2 if (one, other) in self.apart else 0
