"""Fault-injection tests (drills) of the test algorithms in `fakes/algorithms`, which ppoctl does not know: killed at
every moment (`kill_grid`), and resumed from the oldest kept states."""

from pathlib import Path
from typing import Any

import pytest

from end_to_end.kill_grid import resume_from_every_moment
from fakes.algorithms.every import EVERY
from fakes.job import play, result
from ppoctl.store.discard import roll_back
from ppoctl.store.outline import outlines_of
from ppoctl.store.retention import saved_steps
from ppoctl.store.run_paths import RunPaths


@pytest.mark.sampled(3)  # not 4, which would be the same save interval of each algorithm
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("every_steps", [1, 3])
@pytest.mark.parametrize("name", EVERY)
def test_algorithm_killed_at_any_moment_ends_like_an_uninterrupted_run(
    folder: Path, name: str, every_steps: int, half: int
) -> None:
    algorithm = EVERY[name]
    recipe = algorithm.recipe(checkpoint={"every_steps": every_steps, "asynchronous": False})
    resume_from_every_moment(folder, recipe, algorithm.choose, half=half)


@pytest.mark.parametrize("keep_last", [2, None])
@pytest.mark.parametrize("name", EVERY)
def test_algorithm_continues_from_the_oldest_kept_states(folder: Path, name: str, keep_last: int | None) -> None:
    """The kill grid does not find that retention deletes records which the step after the oldest kept state reads,
    because it resumes from the newest."""
    algorithm, paths = EVERY[name], RunPaths(folder / "run")
    checkpoint: dict[str, Any] = {"every_steps": 1, "asynchronous": False, "keep_last": keep_last}
    checkpoint["keep_rollouts_every_steps"] = 0
    play(paths.root, algorithm.recipe(steps=5, checkpoint=checkpoint), choose=algorithm.choose)
    kept = saved_steps(paths, outlines_of(paths).roles)
    assert kept == ([1, 2, 3, 4, 5] if keep_last is None else [4, 5])
    plan, _ = roll_back(paths, kept[0])
    assert (plan.start, plan.broken) == (kept[0], ())
    longer = algorithm.recipe(steps=6, checkpoint=checkpoint)
    play(paths.root, longer, choose=algorithm.choose)
    play(folder / "whole", longer, choose=algorithm.choose)
    continued, whole = result(paths.root), result(folder / "whole")
    assert continued["ledger"] == whole["ledger"]
    assert continued["states"] == whole["states"]
