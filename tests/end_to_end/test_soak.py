"""A part of the soak test of `benchmarks/soak.py`: signals and damage on real engines, hints executed, results
compared.

Cells are divided by case number, not by time, so that each is the same on any machine; all share one folder, which
has the undisturbed runs that they are compared with.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
SEED = 11
KILLS, DAMAGES, A_CELL = 8, 24, 4


def cells(kind: str, count: int) -> list[str]:
    """Names of the cases of each cell, in one string."""
    names = [f"{kind}-{number}" for number in range(1, count + 1)]
    return [" ".join(names[start : start + A_CELL]) for start in range(0, count, A_CELL)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.minutes(3)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", [*cells("kill", KILLS), *cells("damage", DAMAGES)])
def test_run_under_signals_and_damage_ends_like_an_undisturbed_run(folder: Path, cell: str) -> None:
    command = [sys.executable, str(SOAK), "--folder", str(folder), "--seed", str(SEED), "--only", *cell.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
