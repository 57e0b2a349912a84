"""Fault-injection tests (drills) of the test algorithms in `fakes/algorithms`, which ppoctl does not know: killed
(`kill_grid`), and resumed from the oldest kept states."""

from pathlib import Path

import pytest

from end_to_end.kill_grid import States, every_state, in_ci, resume_from, steps_of
from fakes.algorithms.every import EVERY
from fakes.job import play, result
from ppoctl.store.discard import roll_back
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

WALKS = [(name, every_steps) for name in EVERY for every_steps in (1, 3)]
NAMES = ("critic sees all", "resampled, then whitened", "partial rollouts, one step off")
DAILY = [
    *((name, 3, "of own stages") for name in NAMES),
    *(in_ci(name, 3) for name in (*NAMES, "one step off", "partial rollouts", "dynamic sampling, one step off")),
]
READ_LESS = [
    pytest.param(name, marks=pytest.mark.ci("partial rollouts read the step before too"))
    for name in EVERY
    if name not in ("dynamic sampling", "partial rollouts, one step off")
]


@pytest.mark.parametrize(("name", "every_steps", "states"), [*DAILY, *every_state(WALKS)])
def test_algorithm_killed_at_any_moment_ends_like_an_uninterrupted_run(
    folder: Path, name: str, every_steps: int, states: States
) -> None:
    algorithm = EVERY[name]
    recipe = algorithm.recipe(steps=steps_of(states), checkpoint={"every_steps": every_steps, "asynchronous": False})
    resume_from(folder, recipe, algorithm.choose, states=states)


@pytest.mark.parametrize("name", ["dynamic sampling", "partial rollouts, one step off", *READ_LESS])
def test_algorithm_continues_from_the_oldest_kept_states(folder: Path, name: str) -> None:
    """The kill grid does not find that retention deletes records which the step after the oldest kept state reads,
    because it resumes from the newest. Two runs that continue from different steps must end the same."""
    algorithm, ends = EVERY[name], []
    for keep_last, kept in ((2, [2, 3]), (None, [1, 2, 3])):
        checkpoint = {"every_steps": 1, "asynchronous": False, "keep_last": keep_last, "keep_rollouts_every_steps": 0}
        paths = RunPaths(folder / f"keeps {keep_last}")
        play(paths.root, algorithm.recipe(steps=3, checkpoint=checkpoint), choose=algorithm.choose)
        assert RecordedRun(paths).saved_steps == kept
        plan, _ = roll_back(RecordedRun(paths), kept[0])
        assert (plan.start, plan.broken) == (kept[0], ())
        play(paths.root, algorithm.recipe(steps=4, checkpoint=checkpoint), choose=algorithm.choose)
        end = result(paths.root)
        ends.append((end["ledger"], end["states"]))
    assert ends[0] == ends[1]
