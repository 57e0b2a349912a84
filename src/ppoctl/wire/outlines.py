"""The stories of a recipe's steps, as a run directory keeps them."""

from collections.abc import Callable
from typing import Any

from ppoctl.loop.step_functions import StepFunction, outline, step_function_at
from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import Outline, Outlines
from ppoctl.store.run_dir import STORIES

StoryAt = Callable[[Recipe, int], StepFunction]
"""(recipe, step) -> the story of that step."""


def as_recorded(recipe: Recipe, choose: StoryAt = step_function_at) -> dict[str, Any]:
    """What a run directory keeps of a recipe: every key with its value, and the stories that its steps tell."""
    return {**recipe.model_dump(mode="json", by_alias=True), STORIES: outlines(recipe, choose).as_json()}


def outlines(recipe: Recipe, choose: StoryAt = step_function_at) -> Outlines:
    """What each step of the run will consist of."""
    found: dict[int, Outline] = {}
    told = ""
    for step in range(1, recipe.steps + 1):
        story = choose(recipe, step)
        if story.name != told:
            found[step], told = outline(story), story.name
    return Outlines(found)
