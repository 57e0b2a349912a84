"""The recipe that a run continues with, and the error if its file is damaged."""

from pathlib import Path

import pytest

from fakes.components import fake_recipe
from ppoctl.core.errors import RecipeError
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.schema import Recipe
from ppoctl.run.run_recipe import as_recorded, is_edited, recipe_of
from ppoctl.store import run_dir
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "rows.jsonl").write_text("")
    rows = {"format": "gsm8k", "path": str(tmp_path / "rows.jsonl")}
    return fake_recipe(
        steps=7, model={"path": str(tmp_path), "dtype": "float32"}, data={"train": rows}, reward={"kind": "gsm8k"}
    )


@pytest.fixture
def run(tmp_path: Path, recipe: Recipe) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    run_dir.create(paths, recipe_toml=recipe_as_toml(recipe), resolved=as_recorded(recipe), facts={})
    return paths


@pytest.mark.parametrize(("written_value", "leave"), [("true", ("actor", "critic", "generator")), ("false", ())])
def test_boolean_offload_of_earlier_versions_is_converted(
    run: RunPaths, written_value: str, leave: tuple[str, ...]
) -> None:
    """In earlier versions `cluster.offload` was one boolean for all roles."""
    written = run.recipe_toml.read_text()
    assert "offload = []" in written
    run.recipe_toml.write_text(written.replace("offload = []", f"offload = {written_value}"))
    assert recipe_of(RecordedRun(run), []).cluster.offload == leave


@pytest.mark.parametrize("damage", [b"steps = [", b"steps = 7\xff\n", b"stpes = 7\n"], ids=["cut", "flipped", "key"])
def test_invalid_recipe_file_names_the_way_to_the_recorded_recipe(
    run: RunPaths, recipe: Recipe, damage: bytes
) -> None:
    run.recipe_toml.write_bytes(damage)
    with pytest.raises(RecipeError, match=r"recipe\.toml") as raised:
        recipe_of(RecordedRun(run), ["steps=9"])
    assert raised.value.hint is not None
    aside = f"mv {run.recipe_toml} {run.root}/recipe.toml.wrong && ppoctl resume {run.root}"
    assert raised.value.hint == f"edit it, or continue with the recorded recipe: {aside}"
    run.recipe_toml.rename(run.root / "recipe.toml.wrong")
    assert recipe_of(RecordedRun(run), ["steps=9"]) == recipe.model_copy(update={"steps": 9})
    assert recipe_of(RecordedRun(run)) == recipe
    assert run.recipe_toml.is_file()


def test_recipe_file_is_edited_only_if_its_settings_differ(run: RunPaths) -> None:
    assert not is_edited(RecordedRun(run))
    written = run.recipe_toml.read_text()
    run.recipe_toml.write_text(f"# a remark\n{written}")
    assert not is_edited(RecordedRun(run))
    run.recipe_toml.write_text(written.replace("steps = 7", "steps = 8"))
    assert is_edited(RecordedRun(run))
    run.recipe_toml.unlink()
    assert not is_edited(RecordedRun(run))


def test_invalid_option_is_not_attributed_to_the_recipe_file(run: RunPaths) -> None:
    with pytest.raises(RecipeError, match="unknown key `stpes`") as raised:
        recipe_of(RecordedRun(run), ["stpes=9"])
    assert "recorded" not in str(raised.value.hint)
