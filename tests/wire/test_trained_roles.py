"""A recipe that trains one role more, or no critic: code that goes over `recipe.trained` handles both."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fakes.components import fake_components, fake_recipe
from fakes.job import new_run_dir
from ppoctl.algorithms import sizes
from ppoctl.algorithms.role_model import model_of, own_models
from ppoctl.algorithms.role_table import TrainedTable
from ppoctl.core.errors import RecipeError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.ranks import DeviceSharingRanks
from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic
from ppoctl.recipe.fingerprint import fingerprint, result_differences
from ppoctl.recipe.loading.load import examine, from_resolved, load
from ppoctl.recipe.loading.rules.all_rules import violations
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.parallel import layouts, processes, saved_layout
from ppoctl.recipe.schema import Recipe
from ppoctl.run import staging
from ppoctl.run.changed_settings import change
from ppoctl.run.run_recipe import as_recorded, recipe_of
from ppoctl.run.wire.engines import build_engines, place_roles, source_digest
from ppoctl.run.wire.sources import COMPANIONS, model_digests
from ppoctl.start.preflight import check as preflight
from ppoctl.store import run_dir
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"
THREE = ("actor", "critic", "judge")


class TwoCritics(Recipe):
    """A recipe with one more trained role."""

    judge: TrainedTable


def two_critics(*sets: str, **judge: Any) -> TwoCritics:
    tables = load([QUICKSTART], sets).recipe.model_dump(by_alias=True)
    return TwoCritics.model_validate({**tables, "judge": {"optimizer": {"lr": 0.5}, **judge}})


def no_critic(*sets: str) -> Recipe:
    """Return the quickstart without its critic. Its advantages train one, so only code below the rules accepts it."""
    return Recipe.model_validate({**load([QUICKSTART], sets).recipe.model_dump(by_alias=True), "critic": None})


def test_third_role_has_layout_processes_and_sizes() -> None:
    recipe = two_critics("actor.parallel={tensor=2}", "ppo.critic_epochs=3", parallel={"data": 3})
    assert tuple(recipe.trained) == THREE
    assert layouts(recipe) == {
        "actor": ParallelTable(tensor=2),
        "critic": ParallelTable(tensor=2),
        "judge": ParallelTable(data=3),
    }
    assert layouts(two_critics("actor.parallel={tensor=2}"))["judge"] == ParallelTable(tensor=2)
    assert processes(recipe) == {"actor": 2, "critic": 2, "judge": 3, "generator": 1}
    assert saved_layout(recipe, "judge")["data"] == 3
    assert sizes.optimizer_of(recipe, "judge").lr == 0.5
    # Keys of the critic hold for every role with a value head.
    assert [sizes.epochs(recipe, role) for role in THREE] == [recipe.ppo.epochs, 3, 3]


def test_third_role_starts_from_the_base_model() -> None:
    recipe = two_critics("model.critic=org/reward")
    assert [model_of(recipe, role).key for role in THREE] == [
        ("model", "path"),
        ("model", "critic", "path"),
        ("model", "path"),
    ]
    assert list(own_models(recipe)) == ["critic"]


def test_rules_check_the_third_role() -> None:
    recipe = two_critics(optimizer={"lr": 0.5, "lr_min_frac": 0.1}, parallel={"sequence": True})
    assert [problem.what.partition(": ")[0] for problem in violations(recipe, lambda key: "r.toml:1")] == [
        "`judge.optimizer.lr_min_frac` is set, but a constant learning rate never decays",
        "sequence parallelism splits over the tensor ranks, but there is only one",
    ]


def test_third_role_is_placed_and_has_a_trainer() -> None:
    recipe = two_critics("generator.engines=2", "cluster.offload=['actor']")  # two engines: nothing starts here
    placed = place_roles(recipe)
    assert (tuple(placed.trained), dict(placed.rewards)) == (THREE, {})
    assert tuple(placed.processes()) == THREE
    ranks = [each for each in placed.trained.values() if isinstance(each, DeviceSharingRanks)]
    assert [each.role for each in ranks] == list(THREE)
    assert len({id(each.sharing) for each in ranks}) == 1
    components = build_engines(recipe, Mock(counts={}), Mock(), placed, {"model": "files"})
    assert {role: type(trainer) for role, trainer in components.trainers.items()} == {
        "actor": MegatronActor,
        "critic": MegatronCritic,
        "judge": MegatronCritic,
    }
    assert tuple(components.source_digests) == THREE


def test_recipe_without_critic_is_placed_on_one_trained_role() -> None:
    recipe = no_critic("generator.engines=2")
    assert (tuple(layouts(recipe)), processes(recipe)) == (("actor",), {"actor": 1, "generator": 2})
    placed = place_roles(recipe)
    components = build_engines(recipe, Mock(counts={}), Mock(), placed, {"model": "files"})
    assert (tuple(placed.trained), tuple(components.trainers), tuple(components.source_digests)) == (("actor",),) * 3
    assert tuple(fake_components(recipe).trainers) == ("actor",)


def test_recipe_without_critic_is_checked_staged_and_digested() -> None:
    recipe = no_critic()
    assert preflight.check(recipe, rows=False) == []
    assert [asset.key for asset in staging.assets(recipe)][:2] == ["model.path", "tokenizer and template"]
    assert set(model_digests(recipe)) == {"model", COMPANIONS}


def test_recipe_without_critic_is_kept_as_json_and_as_toml(tmp_path: Path) -> None:
    recipe, file = no_critic("model.dtype=float32"), tmp_path / "kept.toml"
    assert from_resolved(recipe.model_dump(mode="json", by_alias=True)) == recipe
    file.write_text(recipe_as_toml(recipe))
    loaded, problems = examine([file], (), {}, judges=())
    assert (loaded and loaded.recipe, problems) == (recipe, [])


def test_differences_list_the_keys_of_an_added_critic() -> None:
    with_critic, without = fake_recipe(), fake_recipe(critic=None)
    found = {key: (old, new) for key, old, new in result_differences(without, with_critic)}
    assert found["critic.optimizer.lr"] == (None, 0.1)
    assert all(key.startswith(("critic.optimizer.", "critic.train", "critic.freeze")) for key in found)
    assert fingerprint(without, ("critic.optimizer",)) != fingerprint(with_critic, ("critic.optimizer",))
    assert fingerprint(without, ("seed", "model", "actor")) == fingerprint(with_critic, ("seed", "model", "actor"))


@pytest.mark.parametrize("begins_with", [True, False])
def test_resume_neither_adds_nor_removes_the_critic(tmp_path: Path, begins_with: bool) -> None:
    both = (fake_recipe(), fake_recipe(critic=None))
    recorded, wanted = both if begins_with else both[::-1]
    resolved = {**as_recorded(fake_recipe()), **recorded.model_dump(mode="json", by_alias=True)}
    paths = new_run_dir(tmp_path / "run", resolved)
    assert change(RecordedRun(paths), recorded) is None
    with pytest.raises(RecipeError) as caught:
        change(RecordedRun(paths), wanted)
    has, asks = ("`actor` and `critic`", "`actor`") if begins_with else ("`actor`", "`actor` and `critic`")
    assert caught.value.message == (
        f"the recipe trains {asks}, but the run trains {has}: a run cannot switch between with and without a critic"
    )
    assert caught.value.hint == "start a new run with another `name`"


HEAD = {"on": "actor", "head": "linear", "layers_copied": 1}
OTHER_CRITICS = {
    "none": ({}, "no value head on the actor's model"),
    "mlp": ({**HEAD, "head": "mlp"}, "a value head on the actor's model (head `mlp`, layers_copied `1`)"),
    "no copies": (
        {**HEAD, "layers_copied": 0},
        "a value head on the actor's model (head `linear`, layers_copied `0`)",
    ),
}


@pytest.mark.parametrize("other", OTHER_CRITICS)
def test_resume_keeps_the_value_head(tmp_path: Path, other: str) -> None:
    table, described = OTHER_CRITICS[other]
    kind = {} if table else {"advantages": {"kind": "grpo"}}
    wanted = fake_recipe(critic=table or None, ppo={"minibatch_seqs": 4, **kind})
    recorded = fake_recipe(critic=HEAD)
    paths = new_run_dir(tmp_path / "run", as_recorded(recorded))
    assert change(RecordedRun(paths), recorded) is None
    with pytest.raises(RecipeError) as caught:
        change(RecordedRun(paths), wanted)
    assert caught.value.message == (
        f"the recipe has {described}, but the run has a value head on the actor's model (head `linear`, "
        "layers_copied `1`): a run cannot change its value head"
    )
    assert caught.value.hint == "start a new run with another `name`"


def test_run_cannot_replace_its_critic_by_a_value_head(tmp_path: Path) -> None:
    paths = new_run_dir(tmp_path / "run", as_recorded(fake_recipe()))
    with pytest.raises(RecipeError, match="a run cannot switch between with and without a critic"):
        change(RecordedRun(paths), fake_recipe(critic=HEAD))


def test_value_head_is_part_of_the_source_of_the_actor_only() -> None:
    heads: list[dict[str, Any]] = [HEAD, {**HEAD, "head": "mlp"}, {**HEAD, "layers_copied": 0}]
    digests = [source_digest(fake_recipe(critic=head), "actor", "abc") for head in heads]
    assert len(set(digests)) == 3
    assert {source_digest(fake_recipe(), role, "abc") for role in ("actor", "critic")} == {"abc:float32"}


def test_setting_of_the_critic_is_refused_for_a_run_without_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    recipe = load([QUICKSTART.with_stem("quickstart-grpo")]).recipe
    run_dir.create(paths, recipe_toml=recipe_as_toml(recipe), resolved=as_recorded(recipe), facts={})
    with pytest.raises(RecipeError, match="a run cannot switch between with and without a critic"):
        recipe_of(RecordedRun(paths), ["critic.optimizer.lr=1e-3"])
    with pytest.raises(RecipeError, match=r"`ppo\.critic_epochs` has no effect"):
        recipe_of(RecordedRun(paths), ["ppo.critic_epochs=2"])
