"""Outlines of the step functions of a recipe, in the form that a run directory stores."""

from collections.abc import Callable
from typing import Any

from ppoctl.loop.step_functions import StepFunction, outline, step_function_at
from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import Outline, Outlines
from ppoctl.store.run_dir import STORIES

StepFunctionAt = Callable[[Recipe, int], StepFunction]
"""(recipe, step) -> the step function of that step."""


def as_recorded(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> dict[str, Any]:
    """Return the content of recipes/N.json: every key of the recipe with its value, and the outlines of the recipe's
    steps."""
    return {**recipe.model_dump(mode="json", by_alias=True), STORIES: outlines(recipe, choose).as_json()}


def outlines(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> Outlines:
    """Return the outlines of all steps of the run."""
    by_first_step: dict[int, Outline] = {}
    last_name = ""
    for step in range(1, recipe.steps + 1):
        step_function = choose(recipe, step)
        if step_function.name != last_name:
            by_first_step[step], last_name = outline(step_function), step_function.name
    return Outlines(by_first_step)
