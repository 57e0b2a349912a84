"""The life of a run on the real engines: SIGKILL at every kind of moment, then resume. See `real_drill.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from story.real_drill import moments_of_the_grid

pytestmark = pytest.mark.engines

SAMPLE = [
    "1 rollout inside",
    "1 values starts",
    "1 critic_update inside",
    "2 reward written",
    "2 logprobs renamed",
    "2 actor_update inside",
    "3 advantages writing",
    "3 actor_update renamed",
    "3 state/actor written",
]
"""Every stage once, every kind of moment at least once."""


def drill(folder: Path, every_steps: int, moments: list[str]) -> list[str]:
    """In a process of its own, because this one may hold engines whose threads do not survive a fork."""
    words = [sys.executable, "-m", "story.real_drill", str(folder), str(every_steps), json.dumps(moments)]
    tests = Path(__file__).parents[1]
    done = subprocess.run(words, cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.timeout(900)
def test_a_run_killed_in_each_stage_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    assert drill(tmp_path, 3, SAMPLE) == SAMPLE


@pytest.mark.story
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("every_steps", [1, 3])
def test_the_whole_grid_of_kills(tmp_path: Path, every_steps: int) -> None:
    grid = moments_of_the_grid(every_steps)
    missed = set(grid) - set(drill(tmp_path, every_steps, grid))
    # Some milliseconds after its start a short stage may be over: then the kill comes later, or never.
    assert {moment for moment in missed if not moment.endswith("inside")} == set()
