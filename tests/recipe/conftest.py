"""A smallest complete recipe in an empty folder, which is the working directory, so that messages contain short
names."""

from collections.abc import Callable
from pathlib import Path

import pytest

SMALLEST = """\
name = "small"
steps = 10
[model]
path = "base"
[data.train]
format = "gsm8k"
path = "train.jsonl"
[rollout]
prompts_per_step = 4
max_prompt_tokens = 20
max_new_tokens = 13
[reward]
kind = "gsm8k"
[ppo]
minibatch_seqs = 2
[actor.optimizer]
lr = 1e-6
[critic.optimizer]
lr = 1e-5
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return `write(text, "a.toml")`, which writes a file into the working directory and returns its relative
    path."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "r.toml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    return write_file


@pytest.fixture
def smallest(write: Write) -> Path:
    return write(SMALLEST)
