"""The quickstarts with and without a critic reach the expectations of their recipes, each from one command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.screens import PAGE, blocks, kinds
from ppoctl.show.report.expectations import history
from ppoctl.store.journal import read_lines

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.one_each_time("quickstarts")
@pytest.mark.minutes(6)
@pytest.mark.parametrize("name", ["quickstart", "quickstart-grpo"])
def test_quickstart_meets_its_expectations(tmp_path: Path, name: str) -> None:
    words = [sys.executable, "-m", "ppoctl", "train", str(ROOT / f"recipes/{name}.toml"), "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = json.loads(done.stdout)["expect"]
    assert [verdict["met"] for verdict in expected] == [True, True]
    screen = blocks(PAGE.read_text("utf-8"))["train"]
    talk = screen.partition("\n")[2].partition("\nmetric ")[0]
    shown = kinds(talk.splitlines())
    if name == "quickstart-grpo":
        shown = {line.replace(" ev #", "") for line in shown} - {"loading the critic"}
    assert kinds(done.stderr.splitlines()) == shown, "docs/screens.md"
    lines = read_lines(tmp_path / f"runs/{name}/journal.jsonl")
    (_, first), *_, (_, last) = history(lines)["eval/heldout/pass_at_1"]
    assert first <= 0.5
    assert last - first >= 0.3
    assert last >= 0.8
    minutes = sum(line.get("seconds", 0.0) for line in lines) / 60
    print(f"\nheld-out pass@1 {first:.3f} -> {last:.3f} in {minutes:.1f} minutes of stages")


TENSOR_RANKS = (
    "actor.parallel={tensor=2}",
    "critic.parallel={tensor=2}",
    "generator.tensor=2",
    "generator.engines=1",
)


@pytest.mark.one_each_time("quickstarts")
@pytest.mark.minutes(1.5)
@pytest.mark.parametrize("changes", [(), TENSOR_RANKS], ids=["data", "tensor"])
def test_quickstart_on_two_ranks_meets_its_expectations(tmp_path: Path, changes: tuple[str, ...]) -> None:
    sets = [word for change in changes for word in ("--set", change)]
    recipe = str(ROOT / "recipes/own/quickstart-2gpu.toml")
    words = [sys.executable, "-m", "ppoctl", "train", recipe, *sets, "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(verdict["met"] for verdict in json.loads(done.stdout)["expect"])


@pytest.mark.one_each_time("quickstarts")
@pytest.mark.minutes(6)
def test_model_with_a_calculator_meets_its_expectations(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ppoctl", "train", str(ROOT / "recipes/own/calculator-small.toml"), "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [verdict["met"] for verdict in json.loads(done.stdout)["expect"]] == [True]
    lines = read_lines(tmp_path / "runs/own-calculator-small/journal.jsonl")
    calls = [
        line["figures"]["environment/calls_mean"]
        for line in lines
        if "environment/calls_mean" in line.get("figures", {})
    ]
    assert calls[0] < 0.75
    assert calls[-1] > 0.95
