"""Recipe of a run: `recipe.toml`, which a person may edit, or the recorded recipe if that file is missing. This
module does not import torch."""

import tomllib
from collections.abc import Sequence
from typing import Any

from ppoctl.algorithms.choose import StepFunctionAt, outlines, step_function_at, trace_at
from ppoctl.core.errors import PpoctlError, RecipeError, quoted
from ppoctl.models.head import SharedValueHead
from ppoctl.recipe.fingerprint import AS_BEFORE, with_earlier_values
from ppoctl.recipe.loading.load import Loaded, examine, from_resolved, load
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.schema import Recipe
from ppoctl.store import artifact
from ppoctl.store.recorded_run import STORIES, RecordedRun


def recipe_of(run: RecordedRun, sets: Sequence[str] = ()) -> Recipe:
    """Return the run's recipe with the settings `sets` applied. Raises RecipeError that names every wrong key."""
    return loaded_of(run, sets).recipe


def loaded_of(run: RecordedRun, sets: Sequence[str] = ()) -> Loaded:
    """Return the run's recipe with the settings `sets` applied, and the origin of each value.

    Raises RecipeError that names every wrong key, or that the settings change the trained roles. If the recipe file
    itself is wrong, the hint has a command that continues with the recorded recipe.
    """
    file = run.paths.recipe_toml
    if not file.exists():
        artifact.write_atomically(file, recipe_as_toml(newest_recorded(run)).encode("utf-8"))
    try:
        return load([file], (*_kept(run), *sets), environ={})
    except RecipeError as error:
        if sets and _is_right(run):
            # The hint of a rule must not lead to a recipe that the run refuses.
            asked, _ = examine([file], (*_kept(run), *sets), {}, judges=())
            if asked is not None:
                require_same_roles(recipe_of(run), asked.recipe)
            raise
        renamed = file.with_name(f"{file.name}.wrong")
        command = f"mv {quoted(file)} {quoted(renamed)} && ppoctl resume {quoted(run.paths.root)}"
        raise RecipeError(error.message, hint=f"edit it, or continue with the recorded recipe: {command}") from error


def _kept(run: RecordedRun) -> list[str]:
    """Return the settings of keys that the recipe file lacks because an earlier version wrote it. Their defaults have
    another meaning, so the run keeps its values."""
    try:
        written = tomllib.loads(run.paths.recipe_toml.read_text("utf-8-sig"))
        recorded = with_earlier_values(run.recipe)
    except (OSError, ValueError, PpoctlError):
        return []  # reading the recipe reports the error
    return [
        f"{table}.{key}={recorded[table][key]}"
        for table, key in AS_BEFORE
        if key not in written.get(table, {key: ""})
    ]


def require_same_roles(recorded: Recipe, recipe: Recipe) -> None:
    """Raise RecipeError if the recipe trains other roles than the run, or has another value head on the actor."""
    changed = recorded.trained.keys() ^ recipe.trained.keys()
    if changed:
        wanted, kept = (" and ".join(f"`{role}`" for role in each.trained) for each in (recipe, recorded))
        raise RecipeError(
            f"the recipe trains {wanted}, but the run trains {kept}: a run cannot switch between with and without "
            + " and ".join(f"a {role}" for role in sorted(changed)),
            hint="start a new run with another `name`",
        )
    if recorded.value_head != recipe.value_head:
        wanted, kept = (_described(each.value_head) for each in (recipe, recorded))
        raise RecipeError(
            f"the recipe has {wanted}, but the run has {kept}: a run cannot change its value head",
            hint="start a new run with another `name`",
        )


def _described(head: SharedValueHead | None) -> str:
    if head is None:
        return "no value head on the actor's model"
    return f"a value head on the actor's model (head `{head.kind}`, layers_copied `{head.layers_copied}`)"


def recorded_recipes(run: RecordedRun) -> dict[int, Recipe]:
    """Return the run's recipes by the first step they hold for."""
    return {start: from_resolved(resolved) for start, resolved in run.recipes.items()}


def rows_of(run: RecordedRun, step: int, stage: str) -> int | None:
    """Return the number of samples of one round of a stage that generates; None for an evaluation."""
    recipes = recorded_recipes(run)
    recipe = recipes[max(start for start in recipes if start <= max(step, 1))]
    specs = {spec.name: spec for spec in trace_at(recipe, step).stages}
    spec = specs.get(stage.partition(".")[0])
    if spec is None:
        return None
    least, most = spec.row_bounds(recipe)
    return least or most


def newest_recorded(run: RecordedRun) -> Recipe:
    """Return the recorded recipe of the newest steps of a run."""
    return from_resolved(run.recipe)


def as_recorded(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> dict[str, Any]:
    """Return the content of recipes/N.json: every key of the recipe with its value, and the outlines of the recipe's
    steps."""
    return {**recipe.model_dump(mode="json", by_alias=True), STORIES: outlines(recipe, choose).as_json()}


def is_edited(run: RecordedRun) -> bool:
    """Whether the recipe file of a run was changed since it was recorded.

    The texts are compared first: paths in the file may be relative, so equal recipes may have different values.
    """
    newest, file = newest_recorded(run), run.paths.recipe_toml
    return file.exists() and file.read_text("utf-8") != recipe_as_toml(newest) and recipe_of(run) != newest


def _is_right(run: RecordedRun) -> bool:
    """Whether the recipe file alone is valid. If it is valid, the settings on the command line are wrong."""
    try:
        load([run.paths.recipe_toml], _kept(run), environ={})
    except RecipeError:
        return False
    return True
