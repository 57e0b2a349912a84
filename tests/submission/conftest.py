"""Recipes for jobs, and Slurm's programs as small scripts that log their calls."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
MODEL = QUICKSTART.parent / "quickstart" / "model"


def recipe_with(*sets: str) -> Recipe:
    """Return the quickstart's recipe with these keys."""
    return load([QUICKSTART], sets, environ={}).recipe


@dataclass(frozen=True)
class Programs:
    """A folder of programs at the front of PATH, and their calls."""

    folder: Path

    @property
    def calls(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text("utf-8").splitlines() if file.exists() else []

    def make(self, name: str, body: str = "") -> None:
        """Create a program that logs its arguments and then executes the body."""
        program = self.folder / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.folder}/asked\n{body}\n', "utf-8")
        program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Put a folder of programs first in PATH; the process is not in a job."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return Programs(folder)


def write_short_quickstart(folder: Path) -> None:
    """Write the quickstart's recipe with rows for one step only: every row is checked before a job is submitted."""
    (folder / "quickstart.toml").write_bytes(QUICKSTART.read_bytes())
    (folder / "quickstart").mkdir()
    (folder / "quickstart" / "model").symlink_to(MODEL)
    for name in ("train.jsonl", "test.jsonl"):
        rows = (QUICKSTART.parent / "quickstart" / name).read_text("utf-8").splitlines(keepends=True)
        (folder / "quickstart" / name).write_text("".join(rows[:128]), "utf-8")
