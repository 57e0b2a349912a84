"""A run whose roles have several processes each: any of them is killed at any stage, resumed, and resumed with
another layout."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from end_to_end.cli_process import TESTS, Forked
from end_to_end.ray_drill import ENDS
from end_to_end.real_drill import real_recipe
from ppoctl.core.batch.records import Rollouts
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.store import manifest as manifests
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import load_record

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

OPTIMIZER = {"lr": 1e-3}
ACTOR = {"optimizer": OPTIMIZER, "parallel": {"tensor": 2, "sequence": True}}
CRITIC = {"optimizer": OPTIMIZER, "parallel": {"data": 2, "distributed_optimizer": True}}
LAYOUT = {
    "actor": ACTOR,
    "critic": CRITIC,
    "checkpoint": {"every_steps": 1, "keep_rollouts_every_steps": 1},
    "cluster": {"threads": 1, "offload": ["actor", "critic", "generator"]},
}

GRID = {"actor": ACTOR, "critic": {"optimizer": OPTIMIZER, "parallel": {"data": 1}}}
"""Fewer processes, for more attempts."""

SURVIVED = [["1 values engine"]]
"""A kill that the run survives. Each attempt starts five processes."""
LOST = [["2 actor_update actor"], []]
"""A kill that ends an attempt."""
BEFORE_THE_CHANGE = [["1 critic_update critic"], []]
"""Kills in a run that is then resumed in another layout."""

PATIENCE_S = 3500.0
"""A drill is one command of many attempts, so it has the timeout of the tests themselves."""

STAGES = ("rollout", "reward", "values", "logprobs", "advantages", "critic_update", "actor_update", "eval")


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed runs: one for each layout, made by the first drill that needs it."""
    return tmp_path_factory.mktemp("wholes")


def run_drill(
    forked: Forked, folder: Path, whole: Path, layout: dict[str, object], attempts: list[list[str]]
) -> list[int]:
    """Return how each attempt ended; fail if the killed run did not end as the undisturbed one, or left something."""
    words = ["end_to_end.ray_drill", str(folder), str(whole), json.dumps(layout), json.dumps(attempts)]
    with (folder / "out").open("w") as out, (folder / "log").open("w") as log:
        pid = forked.start(TESTS, words, out, log)
    assert forked.wait(pid, timeout_s=PATIENCE_S) == 0, (folder / "log").read_text()[-4000:]
    ends: list[int] = json.loads((folder / "out").read_text().splitlines()[-1])
    return ends


def expected_ends(attempts: list[list[str]]) -> list[int]:
    """Return the expected end of each attempt: decided by the last process that is killed in it."""
    return [ENDS[kills[-1].split(" ")[2]] if kills else 0 for kills in attempts]


@pytest.mark.ci("test_ray_processes.py, test_ray_on_nodes.py and the layouts in tests/engines/megatron")
@pytest.mark.parametrize("attempts", [SURVIVED, LOST])
def test_multiprocess_run_survives_a_kill_of_any_process(
    tmp_path: Path, wholes: Path, forked: Forked, attempts: list[list[str]]
) -> None:
    assert run_drill(forked, tmp_path, wholes / "grid", GRID, attempts) == expected_ends(attempts)


@pytest.mark.slow
@pytest.mark.minutes(2)
def test_killed_run_resumes_under_another_parallel_layout(tmp_path: Path, wholes: Path, forked: Forked) -> None:
    whole = wholes / "both"
    assert run_drill(forked, tmp_path, whole, LAYOUT, BEFORE_THE_CHANGE) == expected_ends(BEFORE_THE_CHANGE)
    # The tokens of the first step equal those of one process, and the last state is resumed in another layout.
    recipe = real_recipe(every_steps=1, name="alone", checkpoint={"keep_rollouts_every_steps": 1})
    (tmp_path / "alone.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
    forked.succeeds(tmp_path, "rollout", "alone.toml")
    assert torch.equal(first_tokens(tmp_path / "runs/alone"), first_tokens(whole))
    layout = ["--set", "actor.parallel={pipeline=2}", "--set", "critic.parallel={data=1,distributed_optimizer=true}"]
    longer = forked.succeeds(tmp_path, "resume", "killed", "--set", "steps=4", *layout)
    assert "restored actor at step 3" in longer.stderr


def first_tokens(folder: Path) -> Tensor:
    """Return the tokens of the first step's rollouts."""
    paths = RunPaths(folder)
    manifest = manifests.read(paths.stage(1, "rollout"))
    assert manifest is not None
    rollouts = load_record(paths, 1, "rollout", manifest)
    assert isinstance(rollouts, Rollouts)
    return rollouts.tokens


@pytest.mark.slow
@pytest.mark.minutes(4)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("who", ["actor", "critic", "raylet", "driver"])
def test_full_grid_of_kills_that_end_an_attempt(tmp_path: Path, wholes: Path, forked: Forked, who: str) -> None:
    # Every stage once, each in a separate attempt; three steps in turn, in the order in which they come.
    moments = sorted((1 + number % 3, number, stage) for number, stage in enumerate(STAGES) if stage != "eval")
    attempts = [*([f"{step} {stage} {who}"] for step, _, stage in [*moments, (3, 9, "eval")]), []]
    assert run_drill(forked, tmp_path, wholes / "grid", GRID, attempts) == expected_ends(attempts)


@pytest.mark.slow
@pytest.mark.minutes(2)
@pytest.mark.parametrize("weights", ["shared", "broadcast"])
def test_full_grid_of_engine_kills_within_one_attempt(
    tmp_path: Path, wholes: Path, forked: Forked, weights: str
) -> None:
    # Two engines, separate roles: the requests of one engine are generated by the other, or by itself again.
    kills = [
        f"{step} {stage} engine"
        for step, stages in ((1, STAGES[:3]), (2, STAGES[3:6]), (3, STAGES[6:]))
        for stage in stages
    ]
    layout = {
        "actor": {"optimizer": OPTIMIZER},
        "critic": {"optimizer": OPTIMIZER},
        "generator": {"engines": 2},
        "cluster": {"threads": 1, "placement": "apart", "weights": weights},
    }
    assert run_drill(forked, tmp_path, wholes / weights, layout, [kills]) == [0]


@pytest.mark.slow
@pytest.mark.minutes(2)
def test_parallel_layouts_generate_the_same_tokens_as_one_process(tmp_path: Path, forked: Forked) -> None:
    for name, tables in (
        ("alone", {}),
        ("many", {**LAYOUT, "generator": {"engines": 2}}),
        ("split", {"generator": {"tensor": 2}}),
    ):
        kept = {"checkpoint": {"keep_rollouts_every_steps": 1}}
        recipe = real_recipe(every_steps=1, **{"name": name, **kept, **tables})
        (tmp_path / f"{name}.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
        forked.succeeds(tmp_path, "train", f"{name}.toml", "--set", "steps=1")
    expected = first_tokens(tmp_path / "runs/alone")
    for name in ("many", "split"):
        assert torch.equal(first_tokens(tmp_path / "runs" / name), expected)
