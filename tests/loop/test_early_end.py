"""`[until]`: which step ends a run, and a run that ends before its last step."""

from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, open_run, play, saved_checkpoints
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.early_end import early_end, metrics_by_step
from ppoctl.run.loop.steps import run
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths

REWARD, PASSED, ENTROPY = "reward/score_mean", "eval/held/pass_at_1", "policy/entropy_mean"

# Step -> metrics of a run of ten steps that evaluates every third step.
STEPS: dict[int, dict[str, float]] = {
    0: {PASSED: 0.9},
    1: {REWARD: 0.7, ENTROPY: 2.0},
    2: {REWARD: 0.4, ENTROPY: 1.9},
    3: {REWARD: 0.6, ENTROPY: 1.5, PASSED: 0.5},
    4: {REWARD: 0.8, ENTROPY: 1.4},
    5: {REWARD: float("nan"), ENTROPY: 1.2},
    6: {REWARD: 0.9, ENTROPY: 1.1, PASSED: 0.75},
    7: {REWARD: 0.9, ENTROPY: 1.0},
    9: {REWARD: 0.5, ENTROPY: 0.9, PASSED: 0.75},
    10: {REWARD: 0.9, ENTROPY: 0.9, PASSED: 0.8},
}


def ends_at(until: dict[str, dict[str, float]]) -> list[int]:
    recipe = fake_recipe(steps=10, eval={"every_steps": 3}, until=until)
    return [step for step in range(12) if early_end(recipe, step, lambda at: STEPS.get(at, {})) is not None]


@pytest.mark.parametrize(
    ("until", "steps"),
    [
        ({}, []),
        # An evaluation before the first step does not count, and step 10 is the last step in any case.
        ({PASSED: {"min": 0.75}}, [6, 9]),
        ({PASSED: {"min": 0.75, "for_steps": 2}}, [9]),
        ({PASSED: {"min": 0.75, "for_steps": 3}}, []),
        ({PASSED: {"min": 0.5, "for_steps": 3}}, [9]),
        ({REWARD: {"min": 0.6}}, [1, 3, 4, 6, 7]),
        # Not a number is within no bound, and interrupts a series; a step without the metric does not.
        ({REWARD: {"min": 0.6, "for_steps": 2}}, [4, 7]),
        ({REWARD: {"max": 0.9, "for_steps": 3}}, [3, 4, 9]),
        ({REWARD: {"min": 0.6, "max": 0.85}}, [1, 3, 4]),
        # All metrics must be reported at the step itself.
        ({PASSED: {"min": 0.7}, ENTROPY: {"max": 1.1}}, [6, 9]),
        ({PASSED: {"min": 0.7}, REWARD: {"min": 0.6}}, [6]),
        ({PASSED: {"min": 0.7}, ENTROPY: {"max": 1.2, "for_steps": 3}}, [9]),
    ],
)
def test_run_ends_at_steps_that_report_all_metrics_within_bounds(
    until: dict[str, dict[str, float]], steps: list[int]
) -> None:
    assert ends_at(until) == steps


def test_reason_has_every_value_and_bound() -> None:
    recipe = fake_recipe(steps=10, until={PASSED: {"min": 0.7}, ENTROPY: {"min": 1, "max": 1.5, "for_steps": 2}})
    lines = [{"stage": "all", "step": step, "figures": metrics} for step, metrics in STEPS.items()]
    assert early_end(recipe, 6, metrics_by_step([{"event": "attempt_started"}, *lines])) == (
        f"`{PASSED}` is 0.75 (at least 0.7); `{ENTROPY}` is 1.1 (at least 1 and at most 1.5)"
    )


def endless(**tables: Any) -> Recipe:
    """Return a recipe whose entropy is 2.372, 2.354, 2.353 at the first three steps."""
    until = {ENTROPY: {"max": 2.36, "for_steps": 2}}
    ppo = {"epochs": 2, "minibatch_seqs": 2, "kl": {"place": "reward", "coef": 0.05}}
    common = {"ppo": ppo, "checkpoint": {"every_steps": 2}, "eval": {"every_steps": 2}}
    return fake_recipe(**{"steps": 6, "until": until, **common, **tables})


def stages_of(paths: RunPaths, stage: str) -> list[int]:
    return [line["step"] for line in read_lines(paths.journal) if line.get("stage") == stage]


def test_run_ends_early_saved_and_evaluated_as_at_its_last_step(tmp_path: Path) -> None:
    play(tmp_path / "run", endless())
    paths = RunPaths(tmp_path / "run")
    assert stages_of(paths, "rollout") == [1, 2, 3]
    assert (stages_of(paths, "eval"), saved_checkpoints(paths)) == ([0, 2, 3], [2, 3])
    play(tmp_path / "not-at-end", endless(eval={"every_steps": 2, "at_end": False}))
    assert stages_of(RunPaths(tmp_path / "not-at-end"), "eval") == [0, 2]


def test_ended_run_does_nothing_again_and_continues_without_its_bounds(tmp_path: Path) -> None:
    root = tmp_path / "run"
    play(root, endless())
    paths, said = RunPaths(root), list[str]()
    before = paths.ledger.read_bytes()
    job = open_run(root, endless(), Witness()).job
    object.__setattr__(job, "notify", said.append)
    run(job)
    assert (paths.ledger.read_bytes(), stages_of(paths, "rollout")) == (before, [1, 2, 3])
    assert said == [f"the run ends after step 3 of 6: `{ENTROPY}` is 2.353 (at most 2.36)"]
    play(root, endless(until={}))
    assert stages_of(paths, "rollout") == [1, 2, 3, 4, 5, 6]
    # The steps equal those of a run without the bounds.
    play(tmp_path / "whole", endless(until={}))
    assert paths.ledger.read_bytes() == RunPaths(tmp_path / "whole").ledger.read_bytes()


def test_scheduled_evaluation_decides_before_the_next_step(tmp_path: Path) -> None:
    """pass_at_1 is 0.317 before the first step, 0.358 after step 2, 0.333 after step 4, 0.542 after step 6."""
    for bounds, ended in (({"min": 0.35}, [0, 2]), ({"max": 0.34}, [0, 2, 4]), ({"min": 0.6}, [0, 2, 4, 6])):
        root = tmp_path / str(ended[-1])
        play(root, endless(until={PASSED: bounds}))
        assert stages_of(RunPaths(root), "eval") == ended
        assert stages_of(RunPaths(root), "rollout")[-1] == ended[-1]
