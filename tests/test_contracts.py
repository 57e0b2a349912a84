"""`make contracts`: the quickstart with `[expect]` on fakes, met and unmet; cells that need more GPUs are listed, not
run."""

import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import contracts

from ppoctl.core.errors import ExitCode

ROOT = Path(__file__).parents[1]
ROWS = ("data.train.max_rows=16", "data.eval.heldout.max_rows=8")
ON_FAKES = (sys.executable, str(ROOT / "tests" / "slurm" / "ppoctl_on_fakes.py"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a command for two steps of the quickstart, with expectations for the reward that `--set` adds."""
    monkeypatch.setenv("DRILL", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "recipes" / "quickstart.toml").read_text("utf-8").partition("[expect]")[0]
    Path("tiny.toml").write_text(text.replace('"quickstart/', f'"{ROOT}/recipes/quickstart/'), "utf-8")
    small = ("steps=2", "rollout.prompts_per_step=8", "ppo.minibatch_seqs=8", "tracking.kind=none", *ROWS)
    sets = [word for item in small for word in ("--set", item)]
    return ["tiny.toml", "--runs", "runs", "--out", "table.md", *sets]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| \n").split("|")] for line in text.splitlines()[2:]]


def test_expectations_table_shows_met_and_unmet(kept: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    expect = ["--set", "expect={'reward/score_mean'={min=-1.0}, 'rollout/response_tokens_mean'={max=-1}}"]
    assert contracts.main([*kept, *expect], ON_FAKES) == ExitCode.HEALTH
    table = Path("table.md").read_text("utf-8")
    assert capsys.readouterr().out == table
    met, unmet = cells(table)
    assert met[:4] == ["tiny", "", "reward/score_mean", "at least -1"]
    assert met[5:] == ["2", "met"]
    assert 0 <= float(met[4]) <= 1
    assert unmet[2:4] == ["rollout/response_tokens_mean", "at most -1"]
    assert unmet[5:] == ["2", "UNMET"]
    assert contracts.exit_code([tuple(met)]) == ExitCode.DONE


def test_failed_run_is_not_reported_as_unmet(kept: list[str]) -> None:
    answer = json.dumps({"error": {"message": "`nowhere` does not exist\nnor does that", "exit_code": 3}})
    assert contracts.main(kept, ("sh", "-c", f"printf %s {shlex.quote(answer)}; exit 3")) == ExitCode.INTERNAL
    ((*_, outcome),) = cells(Path("table.md").read_text("utf-8"))
    assert outcome == "FAILED (3): `nowhere` does not exist"


def test_recipe_with_too_many_gpus_is_listed_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert contracts.main(["--gpus", "0"], ("false",)) == 0
    results = {row[0]: row[-1] for row in cells(Path("contracts.md").read_text("utf-8"))}
    assert results["verl/qwen2.5-0.5b-as-log"] == "not run: 1 GPUs, 0 here"
    assert results["dsr1-7b"] == "not run: 64 GPUs, 0 here"
    assert len(results) == len(contracts.published()) >= 4
