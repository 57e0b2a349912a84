"""`make pin-gpu` writes the resolution for every Python version and processor, or nothing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conventions.conftest import ROOT
from conventions.test_requirements import pinned

SCRIPT = (ROOT / "requirements" / "resolve-gpu.sh").read_text("ascii")
PYTHONS = re.findall(r"\b3\.\d+\b", SCRIPT)
PLATFORMS = {
    processor: glibc.replace("_", ".") for processor, glibc in re.findall(r"\b(\w+)-manylinux_(\d_\d+)", SCRIPT)
}
"""Processor -> the oldest glibc for which the pins have wheels."""
UV = """#!/bin/sh
case "$*" in *"$NO_SOLUTION_FOR"*) exit 1;; esac
echo torch==2.13.0
"""


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("3.12", "python 3.12 on aarch64-manylinux_2_34: no solution"),
        ("aarch64", "python 3.11 on aarch64-manylinux_2_34: no solution"),
        ("none", ""),
    ],
)
def test_gpu_versions_are_pinned_only_if_every_python_resolves(tmp_path: Path, without: str, said: str) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    old = "# why\nold==1\n"
    (tmp_path / "requirements" / "gpu.txt").write_text(old, "utf-8")
    uv = tmp_path / ".venv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV, "utf-8")
    uv.chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    environ = {**os.environ, "NO_SOLUTION_FOR": without, "MAKEFLAGS": ""}
    done = subprocess.run(["make", "pin-gpu"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (without == "none")
    assert said in done.stderr
    expected = "# why\ntorch==2.13.0\n" if without == "none" else old
    assert (tmp_path / "requirements" / "gpu.txt").read_text("utf-8") == expected


def test_pages_state_the_glibc_that_the_pins_were_resolved_for() -> None:
    assert set(PLATFORMS) == {"x86_64", "aarch64"}
    stated = f"glibc {PLATFORMS['x86_64']} or later, on aarch64 {PLATFORMS['aarch64']} or later"
    texts = {page: " ".join((ROOT / page).read_text("utf-8").split()) for page in ("docs/install.md", "docs/gpu.md")}
    assert [page for page, text in texts.items() if stated not in text] == []
    [names] = re.findall(r"^NEWER_GLIBC = (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    *others, last = [f"{name} {pinned('gpu')[name]}" for name in names.split()]
    assert f"of them: {', '.join(others)} and {last}." in texts["docs/install.md"]
