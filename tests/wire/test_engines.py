"""What is checked once the model's folder is known."""

from pathlib import Path

from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.recipe.load import load
from ppoctl.wire import processes

RECIPES = Path(__file__).parents[2] / "recipes"


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
