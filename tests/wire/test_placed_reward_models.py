"""Reward models in a run: recorded sources, allowed changes on resume, and device sharing."""

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.fingerprints import STAGES, stage_fingerprint
from fakes.job import new_run_dir
from ppoctl.core.errors import RecipeError, StorageError
from ppoctl.engines.megatron.ranks import DeviceSharingRanks
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe
from ppoctl.run.changed_settings import change
from ppoctl.run.run_recipe import as_recorded
from ppoctl.run.wire.engines import place_roles
from ppoctl.run.wire.sources import model_digests, require_same_sources, reward_digest
from ppoctl.store.recorded_run import RecordedRun
from rewards.reward_models import QUICKSTART, reward_model

QUICKSTART_RECIPE = QUICKSTART.parents[1] / "quickstart.toml"


def recipe_with(judge: Path, **keys: Any) -> Recipe:
    reward = {"kind": "model", "path": str(judge), **keys}
    return fake_recipe(model={"path": str(QUICKSTART), "dtype": "float32"}, reward=reward)


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    return reward_model(tmp_path / "judge")


def test_run_sources_include_reward_models(judge: Path) -> None:
    plain = fake_recipe(model={"path": str(QUICKSTART), "dtype": "float32"})
    before = model_digests(recipe_with(judge))
    assert set(before) - set(model_digests(plain)) == {"reward.path"}
    (judge / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    after = model_digests(recipe_with(judge))
    assert {name for name in before if before[name] != after[name]} == {"reward.path"}
    parts = {"kind": "sum", "parts": {"a": {"kind": "model", "path": str(judge)}, "b": {"kind": "gsm8k"}}}
    summed = model_digests(fake_recipe(model={"path": str(QUICKSTART)}, reward=parts))
    assert summed["reward.parts.a.path"] == after["reward.path"]
    assert "" == reward_digest(model_digests(plain)) != reward_digest(after) != reward_digest(before)


def test_fingerprints_of_scoring_stages_include_reward_models() -> None:
    recipe = fake_recipe()
    assert {
        stage for stage in STAGES if stage_fingerprint(stage, recipe) != stage_fingerprint(stage, recipe, "one")
    } == {"reward", "eval"}
    assert stage_fingerprint("reward", recipe, "one") != stage_fingerprint("reward", recipe, "other")


def test_changed_reward_model_stops_a_resume(judge: Path, tmp_path: Path) -> None:
    recipe = recipe_with(judge)
    layout = new_run_dir(tmp_path / "run", as_recorded(recipe), sources=model_digests(recipe))
    require_same_sources(RecordedRun(layout), model_digests(recipe))
    config = json.loads((judge / "config.json").read_text("utf-8"))
    (judge / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}), "utf-8")
    with pytest.raises(StorageError, match=r"`reward\.path` is not what run .* was made from"):
        require_same_sources(RecordedRun(layout), model_digests(recipe))


def test_resume_keeps_reward_models_and_may_change_their_settings(judge: Path, tmp_path: Path) -> None:
    recipe = recipe_with(judge)
    layout = new_run_dir(tmp_path / "run", as_recorded(recipe))
    other = reward_model(tmp_path / "other")
    for changed, says in (
        (recipe_with(other), f"reward `{other}`"),
        (fake_recipe(model=recipe.model.model_dump()), "none"),
    ):
        with pytest.raises(RecipeError, match="the reward models are") as caught:
            change(RecordedRun(layout), changed)
        assert says in str(caught.value)
    found = change(RecordedRun(layout), recipe_with(judge, template="text"))
    assert found is not None
    assert found.keys == [("reward.template", "own", "text")]


@pytest.mark.parametrize(("listed", "leaves"), [("actor", []), ("reward", ["reward.parts.a"])])
def test_reward_model_shares_devices_if_listed_in_offload(judge: Path, listed: str, leaves: list[str]) -> None:
    reward = f"reward={{kind='sum', parts={{a={{kind='model', path='{judge}'}}, b={{kind='gsm8k'}}}}}}"
    recipe = load([QUICKSTART_RECIPE], [reward, f"cluster.offload=['{listed}']", "generator.engines=2"], {}).recipe
    placed, left = place_roles(recipe), list[str]()
    [(role, ranks)] = placed.rewards.items()
    assert isinstance(ranks, DeviceSharingRanks)
    assert isinstance(placed.trained["actor"], DeviceSharingRanks)
    assert ranks.sharing is placed.trained["actor"].sharing
    for working in (role, "generator"):
        ranks.sharing.acquire(working, lambda working=working: left.append(working))  # type: ignore[misc]
    assert left == leaves
