"""Fault-injection tests (drills) of runs with an environment, on fakes: killed within an episode, then resumed.

Verified: ledger, states and metrics equal those of the undisturbed run, no recorded turn is generated again, and a
torn or damaged log costs only the turns behind the damage. The environments are those of `fakes.conversations`, whose
episodes end in every way.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from end_to_end.kill_grid import KEEPS_EACH, Left, States, Walk, every_state, in_ci, kill_each, resume_from
from fakes.components import BigramGenerator, fake_components, fake_recipe
from fakes.conversations import SumEnvironments
from fakes.job import Witness, open_run, play, result
from ppoctl.algorithms.choose import step_function_at
from ppoctl.core.batch import records
from ppoctl.core.batch.records import Rollouts
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import run
from ppoctl.store.run_paths import RECORD, RunPaths

ENVIRONMENT = {
    "kind": "python", "path": "fakes:Sum", "turns": 3, "tokens": 16, "tokens_per_turn": 6,
    "on_failure": {"score": -0.5},
}  # fmt: skip
ROLLOUT = {**KEEPS_EACH, "max_new_tokens": 10, "stop_token_ids": [3, 5, 7]}
PPO = {"epochs": 1, "minibatch_seqs": 2, "kl": {"place": "reward", "coef": 0.05}, "truncated": "bootstrap"}
GRPO = {"epochs": 1, "minibatch_seqs": 2, "kl": {"place": "none"}, "advantages": {"kind": "grpo"}}
REMAX = {**GRPO, "advantages": {"kind": "remax"}}


def recipe_of(**changes: Any) -> Recipe:
    tables = {
        "seed": 4,
        "steps": 2,
        "rollout": ROLLOUT,
        "environment": ENVIRONMENT,
        "reward": {"kind": "exact_match", "max_error_frac": 1.0},
        "ppo": PPO,
        "eval": {"every_steps": 2, "at_start": False, "environment": {**ENVIRONMENT, "turns": 2}},
        "checkpoint": {"every_steps": 2, "asynchronous": False, "keep_rollouts_every_steps": 1},
    }
    return fake_recipe(**{**tables, **changes})


def rollouts_of(root: Path, step: int) -> Rollouts:
    record = records.decode((RunPaths(root).stage(step, "rollout") / RECORD).read_bytes())
    assert isinstance(record, Rollouts)
    return record


def test_drilled_episodes_end_in_every_way(folder: Path) -> None:
    play(folder / "run", recipe_of(steps=6))
    episodes = [episode for step in range(1, 7) for episode in rollouts_of(folder / "run", step).episodes or ()]
    ends = Counter(episode["end"] for episode in episodes)
    assert ends.keys() >= {"done", "turns", "tokens", "error", "control_tokens"}
    assert {len(episode["turns"]) for episode in episodes} == {0, 1, 2, 3}
    assert {bool(episode["first"]) for episode in episodes} == {True, False}


TABLES = {
    "ppo": {"ppo": PPO}, "grpo": {"critic": None, "ppo": GRPO}, "remax": {"critic": None, "ppo": REMAX},
    "ahead": {"rollout": {**ROLLOUT, "ahead": 1}, "ppo": {**PPO, "rollout_correction": {"kind": "tis"}}, "steps": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "states"),
    [("ahead", "of each stage"), in_ci("ppo"), in_ci("remax"), *every_state((name,) for name in TABLES)],
)
def test_run_killed_at_any_moment_of_an_episode_ends_the_same(folder: Path, name: str, states: States) -> None:
    resume_from(folder, recipe_of(**TABLES[name]), step_function_at, states=states)


def moments_within_rollout(folder: Path, recipe: Recipe) -> Walk:
    """Run the recipe, and return what a kill at each moment of its first rollout leaves."""
    walk = Walk(folder / "whole")

    def act(number: int, name: str) -> None:
        if name.startswith("inside rollout") and not RunPaths(walk.root).stage(1, "rollout").exists():
            walk.on_moment(number, name)

    play(walk.root, recipe, Witness(act=act, turns=True))
    return walk


def recorded_lines(left: Left) -> list[tuple[str, bytes]]:
    """Return the log of the first rollout: its name and its bytes."""
    return [
        (name, data)
        for name, data in left.files.items()
        if data is not None and name.endswith(".jsonl") and ".parts/episodes-" in name
    ]


def test_killed_rollout_generates_only_the_turns_that_are_not_recorded(folder: Path) -> None:
    recipe = recipe_of(steps=1)
    walk = moments_within_rollout(folder, recipe)
    num_turns = sum(len(episode["turns"]) for episode in rollouts_of(walk.root, 1).episodes or ())
    assert num_turns > 4
    of_evaluation = cast(BigramGenerator, play(folder / "again", recipe).generator).num_generated - num_turns
    logs = [b"".join(data for _, data in recorded_lines(left)) for left in walk.all]
    of_count = {log.count(b'"kind": "turn"'): left for left, log in zip(walk.all, logs, strict=True)}
    for recorded, left in of_count.items():
        left.restore(root := folder / f"{recorded}")
        generator = cast(BigramGenerator, play(root, recipe).generator)
        assert generator.num_generated == num_turns - recorded + of_evaluation, left.moments
        assert result(root) == result(walk.root)
    assert of_count.keys() == set(range(num_turns + 1))


def test_torn_or_damaged_log_of_episodes_costs_only_the_turns_behind_it(folder: Path) -> None:
    recipe = recipe_of(steps=1)
    walk = moments_within_rollout(folder, recipe)
    left = walk.all[-1]
    [(name, data)] = recorded_lines(left)
    lines = data.splitlines(keepends=True)
    flipped = lines[3].replace(b'"number": ', b'"number":  ')
    assert flipped != lines[3]
    one_of_each_kind = {json.loads(line)["event"]["kind"]: number for number, line in enumerate(lines)}
    assert one_of_each_kind.keys() >= {"opened", "turn", "observed"}
    damaged = [
        *(b"".join(lines[:count]) + lines[count][: len(lines[count]) // 2] for count in one_of_each_kind.values()),
        b"".join([*lines[:3], flipped, *lines[4:]]),
        data[:-1],
        b"",
    ]
    for number, log in enumerate(damaged):
        replace(left, files={**left.files, name: log}).restore(root := folder / f"{number}")
        play(root, recipe)
        assert result(root) == result(walk.root), log[-200:]


def test_environment_that_answers_differently_after_a_restart_is_a_named_failure(folder: Path) -> None:
    recipe = recipe_of(steps=1)
    walk = moments_within_rollout(folder, recipe)
    whole = rollouts_of(walk.root, 1)
    changed = set()
    for number, left in enumerate(walk.all[::3]):
        left.restore(root := folder / f"{number}")
        other = SumEnvironments(offset=1)
        components = replace(fake_components(recipe), environments=other, eval_environments=other)
        run(open_run(root, recipe, Witness(), components=components).job)
        rollouts = rollouts_of(root, 1)
        assert rollouts.episodes is not None
        assert whole.episodes is not None
        for row, (episode, before) in enumerate(zip(rollouts.episodes, whole.episodes, strict=True)):
            if episode["end"] == "changed":
                changed.add(row)
                assert "differently" in episode["message"]
                # Everything up to the turn that the environment did not answer is as before.
                length = len(episode["turns"])
                assert [turn["text"] for turn in episode["turns"]] == [
                    turn["text"] for turn in before["turns"][:length]
                ]
    assert changed


def test_process_really_killed_within_an_episode_ends_the_same(folder: Path) -> None:
    recipe = recipe_of(steps=1)
    witness = Witness(turns=True)
    play(folder / "whole", recipe, witness)
    numbers = [number for number, name in enumerate(witness.moments) if "at environment step" in name]
    assert len(numbers) > 3
    kill_each(folder, recipe, witness, [numbers[len(numbers) // 2]])


def test_often_killed_episodes_end_like_uninterrupted_ones(folder: Path) -> None:
    """Each attempt records one event or a few, so several files of attempts make up each episode."""
    recipe = recipe_of(steps=1)
    play(folder / "whole", recipe)
    root, deaths = folder / "often", 0

    class DiedError(Exception):
        pass

    def dies(number: int, name: str) -> None:
        if name.startswith("inside rollout") and number >= 8:
            raise DiedError

    while True:
        try:
            play(root, recipe, Witness(act=dies, turns=True))
            break
        except DiedError:
            deaths += 1
            assert deaths < 50
    assert deaths > 3
    assert result(root) == result(folder / "whole")
