"""Commands that read runs of the test algorithms: `status`, `resume --plan`, `show`, `report`; and a run whose stages
another version of ppoctl recorded."""

import json
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

import ppoctl
from fakes.algorithms.every import EVERY
from fakes.algorithms.two_critics import TwoCriticsRecipe
from fakes.components import commands_on_fakes
from fakes.job import StopError, play, stopping_at
from fakes.step_functions import TWO_ROUNDS
from ppoctl.algorithms.choose import outlines
from ppoctl.cli.app import run
from ppoctl.core.errors import ExitCode
from ppoctl.run.run_recipe import as_recorded
from ppoctl.show.report.report_samples import rollouts as report_samples
from ppoctl.show.report.run_reader import read_runs
from ppoctl.store import run_dir
from ppoctl.store.attempt import claim
from ppoctl.store.journal import read_lines
from ppoctl.store.recorded_run import STORIES, RecordedRun
from ppoctl.store.run_paths import RunPaths

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"
MODEL = {"path": str(QUICKSTART.parent / "quickstart/model"), "dtype": "float32"}
IN_ROUND_2 = "3 keep_groups.2 starts"
AFTER_ROUNDS = "3 advantages starts"


@dataclass(frozen=True)
class Cli:
    """Commands with `--json`, as a user types them."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, command: str, root: Path, *words: str, code: int = 0) -> Any:
        assert run([command, str(root), *words, "--json"]) == code
        return json.loads(self.capsys.readouterr().out)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def played(root: Path, name: str, stop: str | None = None) -> Path:
    """Return a run of an algorithm on the quickstart's tokenizer that saves every second step and keeps its rollouts;
    it is stopped at a moment, or complete.

    A recorded table `judge` is left out: a recipe of ppoctl has no such table.
    """
    algorithm = EVERY[name]
    recipe = algorithm.recipe(model=MODEL, checkpoint={"every_steps": 2, "keep_rollouts_every_steps": 1})
    resolved = as_recorded(recipe, algorithm.choose)
    if isinstance(recipe, TwoCriticsRecipe):
        del resolved["judge"]
    run_dir.create(RunPaths(root), recipe_toml="", resolved=resolved, facts={})
    if stop is None:
        play(root, recipe, choose=algorithm.choose)
    else:
        with pytest.raises(StopError):
            play(root, recipe, stopping_at(stop), algorithm.choose)
    return root


def actions(ask: Cli, root: Path, code: int = 0) -> dict[str, list[str]]:
    """Return action -> items of the resume plan."""
    found: dict[str, list[str]] = {}
    for item in ask("resume", root, "--plan", code=code)["items"]:
        found.setdefault(item["action"], []).append(item["item"].removeprefix("steps/"))
    return found


STOPPED = {
    "resampled rows": (
        "critic_update",
        ["10-rollout", "20-reward", "30-values", "40-logprobs", "50-advantages", "55-resample"],
        ["60-critic_update", "70-actor_update"],
    ),
    "resampled, then whitened": (
        "whitening",
        ["10-rollout", "20-reward", "30-values", "40-logprobs", "50-advantages", "55-resample"],
        ["56-whitening", "60-critic_update", "70-actor_update"],
    ),
    "two critics": (
        "judge_update",
        ["10-rollout", "20-reward", "30-values", "judge_values", "40-logprobs", "50-advantages"],
        ["judge_update", "70-actor_update"],
    ),
    "one step off": (
        "actor_update",
        ["20-reward", "40-logprobs", "45-correction", "50-advantages"],
        ["70-actor_update", "75-next_rollout"],
    ),
}
"""Algorithm -> the stage of step 3 before which the run is stopped, the reused stages, and those that are run."""


def and_in_ci(*kept: str, others: Iterable[str]) -> list[Any]:
    """Return these cases, and the others for CI."""
    marks = pytest.mark.ci(", ".join(kept))
    return [*kept, *(pytest.param(case, marks=marks) for case in others if case not in kept)]


@pytest.mark.parametrize("name", and_in_ci("two critics", "one step off", others=STOPPED))
def test_stopped_run_shows_its_stages_and_those_to_run(tmp_path: Path, ask: Cli, name: str) -> None:
    stage, reused, to_run = STOPPED[name]
    root = played(tmp_path / "run", name, f"3 {stage} starts")
    status = ask("status", root)
    assert (status["steps_done"], status["saved_steps"]) == (2, [2])
    roles = outlines(EVERY[name].recipe(), EVERY[name].choose).roles
    before = ["000002/75-next_rollout"] if name == "one step off" else []
    assert actions(ask, root) == {
        "restored": [f"states/{role}/000002" for role in roles],
        "recalled": [*before, *(f"000003/{each}" for each in reused)],
        "run": [f"000003/{each}" for each in to_run],
        **({"replayed": ["000003/60-critic_update"]} if name == "two critics" else {}),
    }
    shown = ask("show", root, "--manifest", "--step", "3")
    done = [*reused, *(["60-critic_update"] if name == "two critics" else [])]
    assert [each.partition("-")[2] or each for each in done] == list(shown["manifests"])


def test_run_stopped_in_round_2_shows_the_stages_of_that_round(tmp_path: Path, ask: Cli) -> None:
    root = played(tmp_path / "run", "dynamic sampling", IN_ROUND_2)
    assert ask("status", root)["steps_done"] == 2
    first = ["10-rollout", "20-reward", "25-keep_groups"]
    assert actions(ask, root) == {
        "restored": ["states/actor/000002"],
        "recalled": [f"000003/{each}" for each in (*first, "10-rollout.2", "20-reward.2")],
        "run": [f"000003/{each}" for each in ("25-keep_groups.2", "40-logprobs", "50-advantages", "70-actor_update")],
    }
    names = list(ask("show", root, "--manifest", "--step", "3")["manifests"])
    assert names == ["rollout", "reward", "keep_groups", "rollout.2", "reward.2"]
    listed = ask("show", root, "--list", "--step", "3")["samples"]
    assert [row.get("round", 1) for row in listed] == [1] * 4 + [2] * 4
    assert all(row["score"] is not None for row in listed)


@pytest.mark.parametrize("stage", and_in_ci("25-keep_groups.2", others=("10-rollout.2", "20-reward.2")))
def test_hole_in_round_2_is_named(tmp_path: Path, ask: Cli, stage: str) -> None:
    root = played(tmp_path / "run", "dynamic sampling", AFTER_ROUNDS)
    rmtree(root / "steps/000003" / stage)
    assert actions(ask, root, code=8)["missing"] == [f"000003/{stage}"]
    assert run(["resume", str(root), "--plan"]) == ExitCode.STORAGE
    assert f"`steps/000003/{stage}` (missing)" in ask.capsys.readouterr().err


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.ci("2"))])
def test_whole_round_that_is_gone_is_named(tmp_path: Path, ask: Cli, number: int) -> None:
    """Step 3 has three rounds."""
    root = played(tmp_path / "run", "dynamic sampling", AFTER_ROUNDS)
    stages = [f"{name}.{number}" for name in ("10-rollout", "20-reward", "25-keep_groups")]
    for stage in stages:
        rmtree(root / "steps/000003" / stage)
    assert actions(ask, root, code=8)["missing"] == [f"000003/{stage}" for stage in stages]


def test_record_of_the_step_before_that_is_gone_is_named(tmp_path: Path, ask: Cli) -> None:
    root = played(tmp_path / "run", "one step off", "3 reward starts")
    rmtree(root / "steps/000002/75-next_rollout")
    assert actions(ask, root, code=8)["missing"] == ["000002/75-next_rollout"]


@pytest.mark.parametrize("name", and_in_ci("critic sees all", others=EVERY))
def test_complete_run_is_shown_and_reported_with_all_of_its_samples(tmp_path: Path, ask: Cli, name: str) -> None:
    root = played(tmp_path / "run", name)
    assert ask("status", root)["steps_done"] == 3
    lines = read_lines(RunPaths(root).ledger)
    for step in (1, 2, 3):
        own = [line for line in lines if line["step"] == step]
        listed = ask("show", root, "--list", "--step", str(step))["samples"]
        keys = ("prompt_id", "sample", "score")
        assert [(row.get("round", 1), *(row[key] for key in keys)) for row in listed] == [
            (line.get("round", 1), line["prompt"], line["sample"], line["score"]) for line in own
        ]
    for step, reported in zip((1, 2, 3), report_samples(read_runs([root])[0], 0, 3), strict=True):
        scores = {line["score"] for line in lines if line["step"] == step}
        assert reported["total"] == len([line for line in lines if line["step"] == step])
        assert {item["score"] for item in reported["items"]} <= {float(f"{score:.5g}") for score in scores}
    page = tmp_path / "report.html"
    assert run(["report", str(root), "--out", str(page)]) == 0
    assert page.stat().st_size > 50_000


def test_run_with_the_stages_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Cli
) -> None:
    commands_on_fakes(monkeypatch)
    changes = {
        "name": "another",
        "steps": 2,
        "rollout.prompts_per_step": 4,
        "data.train.max_rows": 8,
        "ppo.minibatch_seqs": 4,
        "eval.every_steps": 0,
        "checkpoint.every_steps": 1,
        "expect": {},
        "tracking": {"kind": "none"},
    }
    root = ppoctl.train(QUICKSTART, changes, runs=tmp_path).path
    paths = RunPaths(root)
    [recorded] = RecordedRun(paths)._recorded.values()
    stories = outlines(EVERY["resampled rows"].recipe(), lambda _, __: TWO_ROUNDS).as_json()
    run_dir.change_recipe(claim(paths), {**recorded, STORIES: stories}, from_step=1)
    ask.capsys.readouterr()
    assert run(["resume", str(root), "--back-to", "1"]) == ExitCode.STORAGE
    message = ask.capsys.readouterr().err
    assert f"`{root}` recorded step 2 as `two_rounds` (rollout, reward, values," in message
    assert "but this version of ppoctl has another step: `ppo` (rollout, reward, values," in message
    assert not paths.stage(2, "rollout").exists()
    command = message.partition("which this command prints: ")[2].strip()
    printed = subprocess.run(shlex.split(command), check=True, capture_output=True).stdout
    assert command == f"cat {root}/run.json"
    assert json.loads(printed)["versions"]["ppoctl"] == ppoctl.__version__
