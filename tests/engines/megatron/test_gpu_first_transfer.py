"""The dry run of `benchmarks/gpu_first.py`: its parts exist, and weights go from a trainer to a receiver."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.table import PARTS

pytestmark = pytest.mark.engines
COMMAND = Path(__file__).parents[3] / "benchmarks/gpu_first.py"


def test_gpu_check_parts_have_callable_entries() -> None:
    for each in PARTS.values():
        module, _, name = each.entry.partition(":")
        assert callable(getattr(import_module(module), name)), each.name


def test_transfer_dry_run_moves_weights_to_receiver_on_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(COMMAND), "transfer", "--tiny", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    found = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    for way in ("shared", "store"):
        of_way = [line for line in found if line.get("way") == way]
        assert [line["right"] for line in of_way if "right" in line] == [True] * 4
        assert {line["who"] for line in of_way if "who" in line} == {"engine", "trainer"}
        assert of_way[0]["read"] == ["OpenFile"]
