"""The two definitions of the container image install the same, and what they copy suffices for an installation."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

from conventions.conftest import ROOT
from conventions.test_resolve_gpu import PLATFORMS, PYTHONS

FOLDER = "/opt/ppoctl"
BASES = {"ubuntu:24.04": ("3.12", "2.39")}
"""Base image -> versions of its Python and its glibc."""
PROGRAM = """#!/bin/sh
# Plays apt-get, rm and Python: writes down its words, and makes what an environment contains.
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
"-m venv "*)
    echo "index: ${PIP_INDEX_URL:-none} ${UV_DEFAULT_INDEX:-none}" >> "$CALLS"
    for folder; do :; done
    mkdir -p "$folder/bin"
    cp "$0" "$folder/bin/python"; cp "$0" "$folder/bin/uv"; cp "$0" "$folder/bin/ppoctl";;
esac
"""


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "containers" / "Dockerfile").read_text("ascii"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def values(instruction: str) -> list[str]:
    """Return the arguments of each use of an instruction of the Dockerfile."""
    return [arguments for name, arguments in dockerfile() if name == instruction]


def sections() -> dict[str, list[str]]:
    """Return the lines of each section of the Apptainer definition; the header is the section `header`."""
    found: dict[str, list[str]] = {"header": []}
    name = "header"
    for line in (ROOT / "containers" / "ppoctl.def").read_text("ascii").splitlines():
        if line.startswith("%"):
            name = line.removeprefix("%")
            found[name] = []
        elif line.strip() and not line.startswith("#"):
            found[name].append(line.strip())
    return found


def copied(lines: list[str]) -> dict[str, str]:
    """Return the place in the image of each file and folder of the checkout that these lines copy."""
    places = {}
    for line in lines:
        *sources, place = line.split()
        places.update({source: place + source if place.endswith("/") else place for source in sources})
    return places


def test_both_images_install_the_same() -> None:
    assert copied(values("COPY")) == copied(sections()["files"])
    assert sections()["arguments"] == values("ARG")
    [command], [words] = values("RUN"), sections()["post"]
    assert command.replace("${INDEX}", "{{ INDEX }}") == words
    assert sections()["header"] == ["Bootstrap: docker", "From: {{ BASE }}"]
    assert values("FROM") == ["${BASE}"]


def test_command_is_on_path_and_no_entrypoint_hides_it() -> None:
    programs = f"{FOLDER}/.venv/bin"
    assert values("ENV")[0].split()[0] == f"PATH={programs}:${{PATH}}"
    assert sections()["environment"] == [f"export PATH={programs}:$PATH"]
    assert {name for name, _ in dockerfile()} == {"ARG", "FROM", "COPY", "RUN", "ENV"}
    assert set(sections()) == {"header", "arguments", "files", "post", "environment", "test"}


def test_base_has_a_python_and_a_glibc_that_the_pins_were_resolved_for() -> None:
    base = dict(line.split("=", 1) for line in sections()["arguments"])["BASE"]
    python, glibc = BASES[base]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert SpecifierSet(project["requires-python"]).contains(python)
    assert python in PYTHONS
    assert all(SpecifierSet(f">={needed}").contains(glibc) for needed in PLATFORMS.values())


def copy_of_checkout(folder: Path) -> None:
    """Copy into `folder` what the images contain."""
    for source, place in copied(values("COPY")).items():
        assert place == f"{FOLDER}/{source}"
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / source)
        else:
            shutil.copy(ROOT / source, folder)


def test_images_contain_what_an_installation_of_ppoctl_reads(tmp_path: Path) -> None:
    copy_of_checkout(tmp_path)
    build = "from setuptools.build_meta import prepare_metadata_for_build_editable as prepare; prepare('.')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = tomllib.loads((tmp_path / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"]
    assert [name for name in folders.values() if not (tmp_path / name).is_dir()] == []


def calls_of_installation(folder: Path, *index: str) -> list[str]:
    """Run the script of the images in a copy of the checkout, where other programs only write down their words."""
    checkout, programs = folder / "checkout", folder / "programs"
    checkout.mkdir(parents=True)
    programs.mkdir()
    copy_of_checkout(checkout)
    for name in ("apt-get", "rm", "python3"):
        (programs / name).write_text(PROGRAM, "ascii")
        (programs / name).chmod(0o755)
    (checkout / "README.md").chmod(0o600)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    command = ["sh", "containers/install.sh", *index]
    subprocess.run(command, cwd=checkout, env=environ, check=True, stdout=subprocess.PIPE)
    assert (checkout / "README.md").stat().st_mode & 0o044 == 0o044, "every user reads the image"
    return (folder / "calls").read_text("ascii").splitlines()


def test_script_of_the_images_installs_the_pins_from_the_given_index(tmp_path: Path) -> None:
    calls = calls_of_installation(tmp_path / "a", "https://mirror.example/simple")
    assert "index: https://mirror.example/simple https://mirror.example/simple" in calls
    assert "index: none none" in calls_of_installation(tmp_path / "b", "")
    [packages] = [call for call in calls if call.startswith("apt-get install")]
    assert {"g++", "python3-dev", "python3-venv"} <= set(packages.split()), "what `doctor` requires, and venv"
    uv_calls = [call for call in calls if call.startswith("uv ")]
    assert all(" --constraint requirements/gpu.txt " in call for call in uv_calls), uv_calls
    assert uv_calls[-1].endswith(" --editable requirements/..[gpu,dev]")
    assert calls[-1] == "ppoctl --version"
