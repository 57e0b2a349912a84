"""Two short runs on fakes, one of which was resumed with other keys; and a browser for their reports. Chromium is
installed if this process is root on Debian."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import debian
import ppoctl
from fakes.components import commands_on_fakes
from report.browser import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
"""Programs of which one is required."""
QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"
HOSTILE = "</script></pre><img src=x onerror=\"document.title='owned'\"><!--<script>"
"""Text that a model or a user may write."""
LITTLE = {
    "seed": 5,
    "rollout.prompts_per_step": 4,
    "rollout.max_new_tokens": 6,
    "rollout.stop_strings": [HOSTILE],
    "data.eval.heldout.max_rows": 3,
    "ppo.minibatch_seqs": 4,
    "eval.every_steps": 2,
    "checkpoint.keep_rollouts_every_steps": 1,
    "health.truncated.max": 0.0,
    "expect": {},
    "tracking": {"kind": "none"},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """`first` was trained for two steps, and resumed for a third step with a lower learning rate; `second` for two
    steps."""

    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        commands_on_fakes(patch)
        first = ppoctl.train(QUICKSTART, {**LITTLE, "name": "first", "steps": 2}, runs=folder)
        ppoctl.resume(first, {"steps": 3, "actor.optimizer.lr": 1e-4})
        second = ppoctl.train(
            QUICKSTART, {**LITTLE, "name": "second", "steps": 2, "critic.optimizer.lr": 0.5}, runs=folder
        )
    return first.path, second.path


@pytest.fixture(scope="session")
def attacked(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first run, whose model wrote markup into an evaluation."""
    copy = tmp_path_factory.mktemp("attacked") / "first"
    shutil.copytree(runs[0], copy)
    samples = copy / "steps/000003/80-eval/samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    samples.write_text("".join(json.dumps({**row, "response": HOSTILE + row["response"]}) + "\n" for row in rows))
    return copy


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of the browser's program."""
    debian.require(lambda: bool(_found()), "chromium")
    return _found()


def _found() -> str:
    return next(filter(None, map(shutil.which, NAMES)), "")


@pytest.fixture(scope="session")
def browser(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests, because it starts in seconds."""
    with Browser(chromium, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
