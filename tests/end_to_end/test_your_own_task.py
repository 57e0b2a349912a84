"""The page docs/your-own-task.md is followed literally: its files are written and its commands typed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ppoctl.store.journal import read_lines

PAGE = Path(__file__).parents[2] / "docs/your-own-task.md"

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.one_each_time
@pytest.mark.minutes(3)
def test_commands_of_the_own_task_page_train_a_model(tmp_path: Path) -> None:
    here = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    outputs: dict[str, str] = {}
    for kind, file, text in re.findall(r"(?ms)^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE.read_text("utf-8")):
        if file:
            (tmp_path / file).write_text(text, "utf-8")
        for command in text.splitlines() if kind == "sh" else ():
            words = shlex.split(command)
            done = subprocess.run(words, cwd=tmp_path, env=here, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            outputs[words[1]] = done.stdout
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
