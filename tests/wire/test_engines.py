"""What is checked once the model's folder is known."""

from pathlib import Path

import pytest

from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.errors import RecipeError
from ppoctl.recipe.load import load
from ppoctl.wire import engines, processes

RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_layout_is_held_against_a_model_of_the_hub_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the recipe is read nothing is known about it."""
    recipe = load([RECIPES / "quickstart.toml"], ["model.path=some/model", "actor.parallel={tensor=4}"]).recipe
    monkeypatch.setattr("ppoctl.convert.source.model_folder", lambda _: RECIPES / "quickstart" / "model")
    with pytest.raises(RecipeError, match="4 tensor ranks do not divide the model's 2 key/value heads") as caught:
        engines.require_fitting_layout(recipe)
    assert caught.value.hint == "--set actor.parallel.tensor=2"
    engines.require_fitting_layout(load([RECIPES / "quickstart.toml"], ["model.path=some/model"]).recipe)


def test_deadlines_go_to_what_they_are_about() -> None:
    written = ["cluster.update_deadline_s=7", "cluster.draw_deadline_s=5"]
    recipe = load([RECIPES / "quickstart.toml"], written).recipe
    assert processes._deadlines(recipe) == {
        "advance": (5.0, "cluster.draw_deadline_s"),
        "update": (7.0, "cluster.update_deadline_s"),
    }
    # Ranks wait for each other longer than the driver for them.
    assert trainer_settings(recipe, "actor").collective_s > 3600
    longer = load([RECIPES / "quickstart.toml"], ["cluster.update_deadline_s=9000"]).recipe
    assert trainer_settings(longer, "actor").collective_s > 9000
