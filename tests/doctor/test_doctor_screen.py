"""The output of `ppoctl doctor`."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from doctor.machines import driver, node
from fakes.nvml import FakeNvml
from ppoctl.cli.app import run
from ppoctl.cli.doctor import report
from ppoctl.core.finding import Finding, wrong
from ppoctl.core.machine.host_info import HostInfo, TorchBuild, this_machine
from ppoctl.start.doctor.examine import OF_A_MACHINE, findings, of_machine
from recipe.conftest import SMALLEST

NAMES = [
    "driver", "packages", "torch", "GPUs", "compute mode", "peer access", "NCCL", "compiler", "shared memory",
    "open files", "processes", "address space", "locked memory", "ports", "Ray", "Slurm", "runs folder", "locks",
    "rename", "listing", "disk", "disk of /tmp",
]  # fmt: skip


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """Use a disk: `doctor` warns of runs in memory, where the other temporary folders are."""
    with tempfile.TemporaryDirectory(dir=tempfile.gettempdir()) as name:
        yield Path(name)


def gpu_part(here: HostInfo) -> list[Finding]:
    """Findings on packages and GPUs, which do not depend on the machine of the test."""
    found = (check(here) for check in OF_A_MACHINE[:8])
    return [one for each in found for one in ([each] if isinstance(each, Finding) else each)]


def test_screen_of_a_healthy_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(gpu_part(node()), verbose=True, json=False) is None
    said = capsys.readouterr()
    assert said.err == ""
    screen = """\
ok  driver        580.65.06, for CUDA up to 13.0
ok  packages      torch 2.13.0, vllm 0.32.0, megatron-core 0.16.1, ray 2.60.0
ok  torch         2.13.0, built for CUDA 13.0, finds 2 of 2 GPUs
ok  GPUs          2: NVIDIA H100 80GB HBM3 40 GiB, NVIDIA H100 80GB HBM3 80 GiB
ok  compute mode  DEFAULT
ok  peer access   between all 2 GPUs
ok  NCCL          2.29.7
ok  compiler      /usr/bin/cc
8 checks passed
"""
    assert said.out == screen


def test_screen_shows_faults_and_their_fixes(capsys: pytest.CaptureFixture[str]) -> None:
    broken = replace(
        node(), torch=TorchBuild("2.13.0+cpu", None), driver=driver(FakeNvml(count=2, mode=3, apart={(0, 1)}))
    )
    assert report(gpu_part(broken)[2:6], verbose=True, json=False) == 3
    said = capsys.readouterr()
    assert said.err == ""
    screen = """\
error    torch        2.13.0+cpu, built for CPUs, but this machine has 2 GPUs; fix: make setup-gpu  # or, without \
a checkout: uv pip install --reinstall 'ppoctl[gpu]'
ok       GPUs         2: NVIDIA H100 80GB HBM3 40 GiB, NVIDIA H100 80GB HBM3 80 GiB
error    gpu          GPU 0 is in compute mode `EXCLUSIVE_PROCESS` (2 of 2 GPUs): several processes of a run share \
a GPU; fix: sudo nvidia-smi -c DEFAULT
warning  peer access  none between GPUs 0 and 1 (1 of 1 pairs): transfers go through the host; fix: nvidia-smi \
topo -p2p r  # a virtual machine, ACS or an IOMMU may forbid it
1 check passed, 1 warning, 2 failed
"""
    assert said.out == screen


def test_doctor_prints_every_check_and_leaves_no_files(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(on_disk)
    FakeNvml(fault="NVML Shared Library Not Found").plant(monkeypatch)
    assert run(["doctor", "-v"]) == 0
    *checks, count = capsys.readouterr().out.splitlines()
    assert [re.split("  +", line)[1] for line in checks] == NAMES
    assert count == f"{len(NAMES)} checks passed"
    assert run(["doctor"]) == 0
    assert tuple(capsys.readouterr()) == (f"{count}\n", "")
    assert list(on_disk.iterdir()) == []


def test_doctor_json_has_every_finding_and_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This torch is built for CPUs, and the test adds a fake driver with GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    FakeNvml().plant(monkeypatch)
    assert run(["doctor", "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    found = {finding["where"]: finding for finding in said["findings"]}
    assert (found["torch"]["level"], found["torch"]["hint"][:14]) == ("error", "make setup-gpu")
    assert said["error"]["exit_code"] == 3
    assert said["error"]["hint"] == found["torch"]["hint"]


def test_doctor_with_a_recipe_checks_its_requirements(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(on_disk)
    FakeNvml(fault="NVML Shared Library Not Found").plant(monkeypatch)
    Path("r.toml").write_text(SMALLEST.replace('"base"', '"org/base"').replace("train.jsonl", "$DATA_OF_DOC/t.jsonl"))
    monkeypatch.delenv("DATA_OF_DOC", raising=False)
    assert run(["doctor", "r.toml"]) == 3
    *lines, count = capsys.readouterr().out.splitlines()
    assert count.endswith(", 2 failed")
    assert [line.split()[:2] for line in lines] == [["error", "r.toml:7"], ["error", "r.toml:4"]]
    assert lines[0].endswith("fix: export DATA_OF_DOC=VALUE")
    assert "fix: hf download org/base  # not in " in lines[1]
    assert len(lines) == 2, "the other checks passed"
    assert run(["doctor", "r.toml", "-v"]) == 3
    *all_of_it, _ = capsys.readouterr().out.splitlines()
    names = [re.split("  +", line)[1] for line in all_of_it[len(NAMES) + 2 :]]
    assert names == ["layout", "memory", "space", "Ray's address", "MLflow"]
    assert run(["doctor", "r.toml", "--set", "steps=0"]) == 2, "a wrong recipe is an error of its own"


def test_failing_check_becomes_a_finding_and_others_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise OSError("http://me:geheim@host is gone")

    monkeypatch.setattr("shutil.disk_usage", fail)
    *rest, last = findings(of_machine(node(), tmp_path))
    assert len(rest) == len(NAMES) - 2
    assert last == wrong("the check failed: OSError: http://host is gone", "disk", kind="doctor")


def test_machine_with_broken_packages_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "killed-1.0.dist-info").mkdir()
    (tmp_path / "garbled-1.0.dist-info").mkdir()
    (tmp_path / "garbled-1.0.dist-info" / "METADATA").write_bytes(b"Name: \xff")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    found = this_machine()
    assert (found.torch, found.requires, found.versions) == (None, (), {})


def test_version_is_that_of_the_package_which_python_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("first", "2.13.0"), ("second", "2.11.0")):
        metadata = tmp_path / folder / f"torch-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert this_machine().versions == {"torch": "2.13.0"}
