"""The pages docs/your-own-task.md, docs/your-own-loss.md and docs/your-own-environment.md are followed literally:
their files are written and their commands typed."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ppoctl.store.journal import read_lines

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.one_each_time("pages")
@pytest.mark.minutes(3)
def test_commands_of_the_own_task_page_train_a_model(tmp_path: Path) -> None:
    outputs = follow("your-own-task.md", tmp_path)
    assert re.search(r"(?m)^ground truth +0\.000", outputs["validate"])
    assert re.search(r"(?m)^as `#### 7` +1\.100", outputs["validate"])
    metrics = [
        line["figures"] for line in read_lines(tmp_path / "runs/task/journal.jsonl") if line.get("stage") == "reward"
    ]
    assert metrics[0]["reward/right_mean"] < 0.7
    assert metrics[-1]["reward/score_mean"] > 0.9
    answers = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text("utf-8").splitlines()]
    assert len(answers) == 200
    assert (tmp_path / "trained/model.safetensors").is_file()


@pytest.mark.one_each_time("pages")
@pytest.mark.minutes(1)
def test_commands_of_the_own_loss_page_train_a_model(tmp_path: Path) -> None:
    follow("your-own-task.md", tmp_path, only=("recipes", "my-task/make_rows.py"))
    outputs = follow("your-own-loss.md", tmp_path, train=("--set", "steps=2", "--set", "eval.at_start=false"))
    assert outputs["validate"].count("\nok") == 9
    metrics = [line["figures"] for line in read_lines(tmp_path / "runs/task-sapo/journal.jsonl") if "figures" in line]
    # 4 p (1 - p) is 1 where the ratio is 1, and near 1 as long as the policy is near the old one.
    weights = [line["policy/custom_weight"] for line in metrics if "policy/custom_weight" in line]
    assert len(weights) == 2
    assert all(0.9 < weight <= 1 for weight in weights)


@pytest.mark.one_each_time("pages")
@pytest.mark.minutes(3)
def test_commands_of_the_own_environment_page_train_a_model(tmp_path: Path) -> None:
    outputs = follow("your-own-environment.md", tmp_path)
    metrics = [line["figures"] for line in read_lines(tmp_path / "runs/desk/journal.jsonl") if "figures" in line]
    refused = [line["environment/refused_mean"] for line in metrics if "environment/refused_mean" in line]
    assert refused[0] > 0.1
    assert refused[-1] < refused[0]
    scores = [line["reward/score_mean"] for line in metrics if "reward/score_mean" in line]
    assert scores[-1] > scores[0]
    assert "calculator" in outputs["show"]


def follow(page: str, folder: Path, *, only: Sequence[str] = (), train: Sequence[str] = ()) -> dict[str, str]:
    """Write the files of a page and type its commands, or only those with these second words. `train` is added to the
    command that trains. Return the output of each command by its second word."""
    here = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    outputs: dict[str, str] = {}
    for kind, file, text in re.findall(r"(?ms)^```(\w+)(?: (\S+))?\n(.*?)^```$", (DOCS / page).read_text("utf-8")):
        if file:
            (folder / file).write_text(text, "utf-8")
        for command in text.splitlines() if kind == "sh" else ():
            words = shlex.split(command)
            if only and words[1] not in only:
                continue
            words += train if words[1] == "train" else ()
            done = subprocess.run(words, cwd=folder, env=here, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            outputs[words[1]] = done.stdout
    return outputs
