"""Runs whose actor waits for the critic: they equal runs with as many critic-only steps, and decide once."""

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, open_run, play
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import run
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths

SCHEDULE = {"lr": 0.05, "lr_schedule": "linear", "lr_warmup_updates": 4, "lr_decay_updates": 8}


SAMPLED_AGAIN = {"kind": "max_random", "order": "before_whitening"}


def recipe_of(ticks: str, **ppo: Any) -> Recipe:
    return fake_recipe(
        steps=5,
        ppo={"epochs": 1, "critic_epochs": 2, "minibatch_seqs": 4, **ppo},
        actor={"optimizer": {**SCHEDULE, "lr_ticks": ticks}},
        critic={"optimizer": SCHEDULE},
    )


def metrics_of(root: Path, name: str) -> list[float | None]:
    """Return the metric at each step; None: it is absent."""
    lines = [line for line in read_lines(RunPaths(root).journal) if "stage" in line and line["step"] > 0]
    merged: dict[int, dict[str, float]] = {}
    for line in lines:
        merged.setdefault(line["step"], {}).update(line["figures"])
    return [figures.get(name) for _, figures in sorted(merged.items())]


OTHERS_SEE = pytest.mark.ci("steps with samples drawn again")


@pytest.mark.parametrize(
    ("ticks", "ppo"),
    [
        ("step", {"resample": SAMPLED_AGAIN}),
        pytest.param("update", {}, marks=OTHERS_SEE),
        pytest.param("step", {}, marks=OTHERS_SEE),
        pytest.param("step", {"resample": {**SAMPLED_AGAIN, "order": "after_whitening"}}, marks=OTHERS_SEE),
    ],
    ids=str,
)
def test_waiting_equals_as_many_critic_only_steps(tmp_path: Path, ticks: str, ppo: dict[str, Any]) -> None:
    roots = tmp_path / "until", tmp_path / "fixed"
    until = play(roots[0], recipe_of(ticks, critic_only_until={"explained_variance": 1.0, "at_most": 2}, **ppo))
    fixed = play(roots[1], recipe_of(ticks, critic_only_steps=2, **ppo))
    for role in ("actor", "critic"):
        for file in ("table.bin", "moments.bin", "count.json"):
            one, other = (RunPaths(root).state(role, 5) / file for root in roots)
            assert one.read_bytes() == other.read_bytes(), f"{role} {file}"
    assert metrics_of(roots[0], "policy/lr") == metrics_of(roots[1], "policy/lr")
    assert metrics_of(roots[0], "policy/lr")[:3] == [None, None, 0.025]
    assert metrics_of(roots[0], "policy/trained") == [0.0, 0.0, 1.0, 1.0, 1.0]
    # The weights are sent to the generator as rarely, and the actor's unchanged states are links.
    assert until.generator.syncs == fixed.generator.syncs  # type: ignore[attr-defined]
    used = [
        [sorted(json.loads(line)["used_by"]) for line in RunPaths(root).ledger.read_text().splitlines()]
        for root in roots
    ]
    assert used[0] == used[1] == [["critic"]] * 16 + [["actor", "critic"]] * 24


def test_actor_trains_on_after_the_critic_was_good_once(tmp_path: Path) -> None:
    play(tmp_path / "run", recipe_of("update", critic_only_until={"explained_variance": 0.02, "at_most": 4}))
    reached = [
        value is not None and value >= 0.02 for value in metrics_of(tmp_path / "run", "value/explained_variance")
    ]
    assert reached == [False, False, True, False, False]
    assert metrics_of(tmp_path / "run", "policy/trained") == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert [value is None for value in metrics_of(tmp_path / "run", "policy/approx_kl")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_condition_of_a_run_whose_actor_has_trained_is_met(tmp_path: Path) -> None:
    first = recipe_of("update").model_copy(update={"steps": 2})
    play(tmp_path / "run", first)
    later = recipe_of("update", critic_only_until={"explained_variance": 1.0, "at_most": 4})
    run(open_run(tmp_path / "run", later, Witness(), recipes={1: first, 3: later}).job)
    assert metrics_of(tmp_path / "run", "policy/trained") == [None, None, 1.0, 1.0, 1.0]
