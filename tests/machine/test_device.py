"""The device is decided in one place: an existing GPU that cannot be used is an error, never a silent CPU run."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conventions.conftest import ROOT, modules
from doctor.machines import driver
from fakes.nvml import NO_LIBRARY, FakeNvml
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.core.machine import device

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset this process to an undecided device, with a torch without CUDA."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device.on_gpu.cache_clear()
    yield
    device.on_gpu.cache_clear()


@pytest.mark.parametrize("fault", ["Driver Not Loaded", "Driver/library version mismatch", "GPU is lost"])
def test_broken_driver_is_an_error_instead_of_a_cpu_run(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    FakeNvml(fault=fault).plant(monkeypatch)
    with pytest.raises(EnvironmentProblemError, match=rf"driver that is broken.*not available \({fault}\).*`export"):
        device.this_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.this_device() == CPU


@pytest.mark.parametrize("nvml", [FakeNvml(fault=NO_LIBRARY), FakeNvml(count=0)])
def test_gpu_known_only_to_the_kernel_is_expected_by_cuda_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvml: FakeNvml
) -> None:
    nvml.plant(monkeypatch)
    glob = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda folder, names: glob(tmp_path if folder == Path("/dev") else folder, names)
    )
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert device.this_device() == CPU
    device.on_gpu.cache_clear()
    (tmp_path / "nvidia0").touch()
    with pytest.raises(EnvironmentProblemError, match="has a GPU that is hidden from this process"):
        device.this_device()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device.this_device() == CPU, "a container without GPUs"


def test_gpu_unusable_by_torch_is_an_error_with_driver_and_build(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(driver="535.104.05", cuda=12020).plant(monkeypatch)
    with pytest.raises(EnvironmentProblemError) as error:
        device.this_device()
    assert error.value.message == (
        f"this machine has 2 GPUs, but torch `{torch.__version__}`, built for CPUs only, cannot use it: Torch not "
        "compiled with CUDA enabled; NVIDIA driver: version 535.104.05. To compute on CPUs anyway: "
        "`export CUDA_VISIBLE_DEVICES=`"
    )
    assert error.value.hint == "make setup-gpu  # or on CPUs: export CUDA_VISIBLE_DEVICES="


def test_gpu_assigned_by_ray_is_expected_without_a_driver_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(fault=NO_LIBRARY).plant(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    message = r"given GPU `3` \(`CUDA_VISIBLE_DEVICES`\).*not available \(NVML.*anyway: `unset CUDA_VISIBLE_DEVICES`"
    with pytest.raises(EnvironmentProblemError, match=message):
        device.this_device()


@pytest.mark.parametrize("shown", ["", " ", "-1", "NoDevFiles"])
def test_empty_cuda_visible_devices_uses_the_cpu(monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    FakeNvml().plant(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert device.this_device() == CPU


@pytest.mark.parametrize(
    ("environ", "indices"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "9"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1, 0,7,2"}, [2, 1]),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2c0ffee,GPU-0c0ffee0-0000"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-0"}, [0, 1, 2]),
    ],
)
def test_visible_gpus_match_the_order_of_cuda(environ: dict[str, str], indices: list[int]) -> None:
    """GPU 0 is the oldest, so CUDA numbers it last."""
    simulated = driver(FakeNvml(count=3, first=(7, 0)))
    assert [gpu.index for gpu in device.visible(simulated, environ)] == indices


def test_device_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(count=0).plant(monkeypatch)
    assert not device.on_gpu()
    FakeNvml().plant(monkeypatch)
    assert not device.on_gpu()


def test_vllm_import_does_not_make_an_unusable_driver_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import vllm` sets the variable, after which `is_available` counts the GPUs that NVML sees."""
    import os

    FakeNvml().plant(monkeypatch)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1")
    with pytest.raises(EnvironmentProblemError, match="this machine has 2 GPUs"):
        device.this_device()
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", "it is as vLLM left it"


def test_current_cuda_gpu_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device.this_device() == torch.device("cuda", 1)


def test_only_device_module_calls_is_available() -> None:
    asks = [str(path) for path in modules() if "is_available()" in (ROOT / "src/ppoctl" / path).read_text("utf-8")]
    assert asks == ["core/machine/device.py"]


def test_vllm_still_sets_the_nvml_check_variable() -> None:
    """The text is read from the source file, because importing it takes ten seconds."""
    where = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    folder = subprocess.run([sys.executable, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    assert '"PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"' in (Path(folder) / "env_override.py").read_text("utf-8")
