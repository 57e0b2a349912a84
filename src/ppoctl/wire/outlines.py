"""Outlines of the steps of a recipe in the form that a run directory stores, and the check that they still hold."""

from collections.abc import Mapping
from typing import Any

from ppoctl.algorithm.choose import StepFunctionAt, outlines, step_function_at, trace_at
from ppoctl.errors import StorageError, quoted
from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import Outline, Outlines
from ppoctl.store.retention import saved_steps
from ppoctl.store.run_dir import STORIES
from ppoctl.store.run_paths import RunPaths


def as_recorded(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> dict[str, Any]:
    """Return the content of recipes/N.json: every key of the recipe with its value, and the outlines of the recipe's
    steps."""
    return {**recipe.model_dump(mode="json", by_alias=True), STORIES: outlines(recipe, choose).as_json()}


def require_same_steps(
    paths: RunPaths, recipes: Mapping[int, Recipe], recorded: Outlines, choose: StepFunctionAt
) -> None:
    """Raise StorageError if this version of ppoctl would run or replay a step with other stages than the run
    recorded.

    Steps up to the newest saved states are finished and are not checked.
    """
    first = max(saved_steps(paths, recorded.roles), default=0) + 1
    last = recipes[max(recipes)].steps
    starts = {step for step in (*recorded.by_start, *recipes) if first < step <= last}
    for step in sorted({first, *starts} if first <= last else ()):
        start = max(start for start in recipes if start <= step)
        now, then = trace_at(recipes[start], step, choose).outline, recorded.at(step)
        if now != then:
            message = (
                f"`{paths.root}` recorded step {step} as {_words(then)}, but this version of ppoctl has another step"
            )
            raise StorageError(
                f"{message}: {_words(now)}",
                hint="continue with the version that began it, which this command prints: "
                f"cat {quoted(paths.run_json)}",
            )


def _words(outline: Outline) -> str:
    return f"`{outline.story}` ({', '.join(outline.names)})"
