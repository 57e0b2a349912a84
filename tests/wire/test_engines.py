"""What is checked once the model's folder is known."""

from pathlib import Path

import pytest

from ppoctl.errors import RecipeError
from ppoctl.recipe.load import load
from ppoctl.wire import engines

RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_layout_is_held_against_a_model_of_the_hub_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the recipe is read nothing is known about it."""
    recipe = load([RECIPES / "quickstart.toml"], ["model.path=some/model", "actor.parallel={tensor=4}"]).recipe
    monkeypatch.setattr("ppoctl.convert.source.model_folder", lambda _: RECIPES / "quickstart" / "model")
    with pytest.raises(RecipeError, match="4 tensor ranks do not divide the model's 2 key/value heads") as caught:
        engines.require_fitting_layout(recipe)
    assert caught.value.hint == "--set actor.parallel.tensor=2"
    engines.require_fitting_layout(load([RECIPES / "quickstart.toml"], ["model.path=some/model"]).recipe)
