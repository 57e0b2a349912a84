"""Two values of the keys of generation ahead of training: which weights generate the responses of a step, and which
recipes are accepted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fakes.components import FEW_ROWS, fake_recipe
from fakes.job import play
from ppoctl.core.batch.update import step_of
from ppoctl.recipe.loading.rules.ahead_rules import check_stale_responses_are_corrected
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths
from wiring.cases import holds

PPO = {"epochs": 2, "minibatch_seqs": 2, "rollout_correction": {"kind": "tis"}}


def stamps_of(paths: RunPaths) -> dict[int, set[str]]:
    """Return step -> the states that generated its responses, without their lineage."""
    found: dict[int, set[str]] = {}
    for line in map(json.loads, paths.ledger.read_text("utf-8").splitlines()):
        found.setdefault(line["step"], set()).add(line["stamp"].partition(":")[0])
    return found


@holds("rollout.ahead")
def test_weights_before_the_last_update_generate_the_responses_ahead_of_training(tmp_path: Path) -> None:
    """The states of steps 1 to 4 with `ahead` 0 to 2, the age that the update reports, and the prompts."""
    found: dict[int, Any] = {}
    for ahead in (0, 1, 2):
        paths = RunPaths(tmp_path / str(ahead))
        play(paths.root, fake_recipe(steps=4, rollout={**FEW_ROWS, "ahead": ahead}, ppo=PPO))
        ages = [
            line["figures"].get("policy/staleness_max")
            for line in read_lines(paths.journal)
            if line.get("stage") == "actor_update"
        ]
        ledger = [json.loads(line) for line in paths.ledger.read_text("utf-8").splitlines()]
        found[ahead] = stamps_of(paths), ages, [(line["step"], line["prompt"], line["sample"]) for line in ledger]
    states = {ahead: [*stamps.values()] for ahead, (stamps, _, _) in found.items()}
    assert states == {
        0: [{"actor@0"}, {"actor@1"}, {"actor@2"}, {"actor@3"}],
        1: [{"actor@0"}, {"actor@0"}, {"actor@1"}, {"actor@2"}],
        2: [{"actor@0"}, {"actor@1"}, {"actor@0"}, {"actor@1"}],
    }
    ages = {ahead: of_ahead for ahead, (_, of_ahead, _) in found.items()}
    assert ages == {0: [None] * 4, 1: [0.0, 1.0, 1.0, 1.0], 2: [0.0, 0.0, 2.0, 2.0]}
    assert found[0][2] == found[1][2] == found[2][2], (
        "the prompts of a step do not depend on when their responses are generated"
    )


@holds("rollout.tokens_per_step")
def test_responses_of_several_steps_have_the_weights_of_each_and_train_once(tmp_path: Path) -> None:
    """Five steps of two prompts, whole and in segments of two tokens. Each trained group is one whole group, in the
    order of the prompts except for those that end later, and its age is that of its first token."""
    found: dict[Any, Any] = {}
    for per_step in (None, 2):
        paths = RunPaths(tmp_path / str(per_step))
        rollout = {**FEW_ROWS, "max_new_tokens": 5, "tokens_per_step": per_step}
        play(paths.root, fake_recipe(steps=6, rollout=rollout, ppo=PPO))
        found[per_step] = [json.loads(line) for line in paths.ledger.read_text("utf-8").splitlines()]
        if per_step is None:
            continue
        ages = {line["step"]: line["figures"]["policy/staleness_max"] for line in read_lines(paths.journal)
                if line.get("stage") == "actor_update"}  # fmt: skip
    assert not any("segments" in line for line in found[None])
    continued = [line for line in found[2] if "segments" in line]
    assert continued, "some response has several segments"
    for line in continued:
        steps, tokens = zip(*((step_of(stamp), count) for stamp, count in line["segments"]), strict=True)
        assert [*steps] == [*range(steps[0], steps[0] + len(steps))]
        assert line["stamp"] == line["segments"][-1][0]
        # Only the first segment can have a second round of two tokens, and only the last one fewer than two.
        assert all(count == 2 for count in tokens[1:-1])
        assert sum(tokens) <= 5
    oldest = {line["step"]: 0 for line in found[2]}
    for line in found[2]:
        first = step_of(line["segments"][0][0] if "segments" in line else line["stamp"])
        oldest[line["step"]] = max(oldest[line["step"]], line["step"] - 1 - first)
    assert {step: float(age) for step, age in oldest.items()} == ages
    assert max(oldest.values()) in (1, 2)
    samples = [(line["prompt"], line["sample"]) for line in found[2]]
    assert len(set(samples)) == len(samples)
    assert {*samples} <= {(line["prompt"], line["sample"]) for line in found[None]}
    assert [pair[1] for pair in samples] == [0, 1] * (len(samples) // 2), "groups are whole"


@holds("rollout.accept_stale")
@pytest.mark.parametrize(
    ("ppo", "accept_stale", "is_accepted"),
    [
        ({"minibatch_seqs": 2}, False, False),
        ({"minibatch_seqs": 2}, True, True),
        ({"minibatch_seqs": 2, "old_logprobs": "sampler"}, False, True),
        ({"minibatch_seqs": 2, "max_sequence_gap": 2.0}, False, True),
    ],
)
def test_old_responses_need_a_correction_or_a_word(
    ppo: dict[str, Any], accept_stale: bool, is_accepted: bool
) -> None:
    recipe = fake_recipe(rollout={**FEW_ROWS, "ahead": 1, "accept_stale": accept_stale}, ppo=ppo)
    assert [*check_stale_responses_are_corrected(recipe)] == [] or not is_accepted
    assert is_accepted or len([*check_stale_responses_are_corrected(recipe)]) == 1


def test_first_round_of_dynamic_sampling_is_generated_ahead_and_further_rounds_are_not(tmp_path: Path) -> None:
    """Rounds use the same prompts as without `ahead`: the next step begins after the last round of this one."""
    groups = {"max_rounds": 4, "when_short": "use_fewer"}
    grpo = {**PPO, "advantages": {"kind": "grpo"}}
    paths = RunPaths(tmp_path / "run")
    rollout = {**FEW_ROWS, "ahead": 1, "groups": groups}
    play(paths.root, fake_recipe(seed=13, steps=4, rollout=rollout, ppo=grpo, critic=None))
    lines = [json.loads(line) for line in paths.ledger.read_text("utf-8").splitlines()]
    ages = {(line["step"], line.get("round", 1)): line["step"] - 1 - step_of(line["stamp"]) for line in lines}
    assert {age for (step, number), age in ages.items() if step > 1 and number == 1} == {1}
    assert {age for (step, number), age in ages.items() if step == 1 or number > 1} == {0}
    assert any(number > 1 for step, number in ages if step > 1), "some step has several rounds"
    used = [*dict.fromkeys(line["prompt"] for line in lines)]
    assert used == [f"p{number}" for number in range(len(used))]


def test_no_step_of_partial_rollouts_has_more_updates_than_planned(tmp_path: Path) -> None:
    """One update per step is planned; some steps have more sequences than a minibatch."""
    paths = RunPaths(tmp_path / "run")
    rollout = {**FEW_ROWS, "prompts_per_step": 4, "max_new_tokens": 5, "tokens_per_step": 2}
    optimizer = {"lr": 0.05, "lr_schedule": "linear"}
    ppo = {"minibatch_seqs": 8, "rollout_correction": {"kind": "tis"}}
    play(paths.root, fake_recipe(seed=3, steps=6, rollout=rollout, ppo=ppo, actor={"optimizer": optimizer}))
    sequences = Counter(json.loads(line)["step"] for line in paths.ledger.read_text("utf-8").splitlines())
    assert max(sequences.values()) > 8 > min(sequences.values())
    rates = [
        line["figures"]["policy/lr"] for line in read_lines(paths.journal) if line.get("stage") == "actor_update"
    ]
    assert rates == pytest.approx([0.05 * (1 - step / 6) for step in range(6)])
