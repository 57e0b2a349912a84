"""`make pin-gpu` writes the resolution for every Python version, or nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conventions.conftest import ROOT

UV = """#!/bin/sh
case "$*" in *"$NO_SOLUTION_FOR"*) exit 1;; esac
echo torch==2.13.0
"""


@pytest.mark.parametrize(("without", "pinned"), [("3.12", "old==1\n"), ("none", "# why\ntorch==2.13.0\n")])
def test_gpu_versions_are_pinned_only_if_every_python_resolves(tmp_path: Path, without: str, pinned: str) -> None:
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
    assert ("python 3.12: no solution" in done.stderr) == (without == "3.12")
    assert (tmp_path / "requirements" / "gpu.txt").read_text("utf-8").endswith(pinned)
