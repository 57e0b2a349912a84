"""Recipes for jobs, and Slurm's programs as small scripts that write down what they were asked."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppoctl.loading.load import load
from ppoctl.recipe.schema import Recipe

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
MODEL = QUICKSTART.parent / "quickstart" / "model"


def recipe_with(*sets: str) -> Recipe:
    """The quickstart's recipe with these keys."""
    return load([QUICKSTART], sets, environ={}).recipe


@dataclass(frozen=True)
class Programs:
    """A folder of programs in front of PATH, and what they were asked."""

    folder: Path

    @property
    def calls(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text("utf-8").splitlines() if file.exists() else []

    def make(self, name: str, body: str = "") -> None:
        """A program that writes down its arguments, and then does what the body says."""
        program = self.folder / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.folder}/asked\n{body}\n', "utf-8")
        program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Programs found before all others; the process is in no job."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return Programs(folder)


def write_short_quickstart(folder: Path) -> None:
    """The quickstart's recipe with a step of its rows: before a job is submitted, every row is examined."""
    (folder / "quickstart.toml").write_bytes(QUICKSTART.read_bytes())
    (folder / "quickstart").mkdir()
    (folder / "quickstart" / "model").symlink_to(MODEL)
    for name in ("train.jsonl", "test.jsonl"):
        rows = (QUICKSTART.parent / "quickstart" / name).read_text("utf-8").splitlines(keepends=True)
        (folder / "quickstart" / name).write_text("".join(rows[:128]), "utf-8")
