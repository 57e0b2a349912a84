"""Reading of NVIDIA's management library, with a fake of its Python binding."""

import sys

import pytest

from fakes.nvml import NO_LIBRARY, FakeNvml, NVMLError
from ppoctl.core.machine import nvml


def test_driver_gpus_and_peer_access_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(count=3, cuda=12080, mode=3, apart={(0, 2)}).plant(monkeypatch)
    read = nvml.look()
    assert isinstance(read, nvml.Driver)
    assert (read.version, read.cuda, read.apart) == ("580.65.06", (12, 8), ((0, 2),))
    assert [gpu.memory_bytes for gpu in read.gpus] == [80 << 30, 40 << 30, 20 << 30]
    assert {(gpu.compute_mode, gpu.capability) for gpu in read.gpus} == {("EXCLUSIVE_PROCESS", (9, 0))}


def test_gpu_without_reported_memory_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(count=1, memory=None).plant(monkeypatch)
    read = nvml.look()
    assert isinstance(read, nvml.Driver)
    assert read.gpus[0].memory_bytes is None


def test_unavailable_driver_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(fault="Driver/library version mismatch").plant(monkeypatch)
    assert nvml.look() == nvml.NoDriver("Driver/library version mismatch", is_broken=True)
    FakeNvml(fault=NO_LIBRARY).plant(monkeypatch)
    assert nvml.look() == nvml.NoDriver(NO_LIBRARY)


def test_lost_gpu_is_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: FakeNvml, index: int) -> int:
        raise NVMLError(f"GPU {index} is lost")

    FakeNvml().plant(monkeypatch)
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetHandleByIndex", lost)
    assert nvml.look() == nvml.NoDriver("GPU 0 is lost", is_broken=True)


def test_missing_pynvml_package_gives_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.look() == nvml.NoDriver("the package `nvidia-ml-py` is not installed")
