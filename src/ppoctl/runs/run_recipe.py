"""The recipe of a run: `recipe.toml`, which a person may edit, or what was recorded where that is gone. Light."""

from collections.abc import Sequence

from ppoctl.errors import RecipeError, quoted
from ppoctl.loading.load import Loaded, from_resolved, load
from ppoctl.loading.write import recipe_as_toml
from ppoctl.recipe.schema import Recipe
from ppoctl.store import artifact, run_dir
from ppoctl.store.run_paths import RunPaths


def recipe_of(paths: RunPaths, sets: Sequence[str] = ()) -> Recipe:
    """The run's recipe with `sets` over it. Raises RecipeError naming every wrong key."""
    return loaded_of(paths, sets).recipe


def loaded_of(paths: RunPaths, sets: Sequence[str] = ()) -> Loaded:
    """The run's recipe with `sets` over it, and where each of its values was set.

    Raises RecipeError naming every wrong key; of a wrong file, the hint goes on with what was recorded.
    """
    file = paths.recipe_toml
    if not file.exists():
        recorded = recorded_recipes(paths)
        artifact.write_atomically(file, recipe_as_toml(recorded[max(recorded)]).encode("utf-8"))
    try:
        return load([file], sets, environ={})
    except RecipeError as error:
        if sets and _is_right(paths):
            raise
        aside = file.with_name(f"{file.name}.wrong")
        command = f"mv {quoted(file)} {quoted(aside)} && ppoctl resume {quoted(paths.root)}"
        raise RecipeError(error.message, hint=f"edit it, or go on with what was recorded: {command}") from error


def recorded_recipes(paths: RunPaths) -> dict[int, Recipe]:
    """The run's recipes by the first step they hold for."""
    return {start: from_resolved(resolved) for start, resolved in run_dir.recipes(paths).items()}


def is_edited(paths: RunPaths) -> bool:
    """Whether somebody has changed what the run's file asks for since it was written down. A path in it may be
    relative, where no command made it absolute: the text is then what tells."""
    recorded = recorded_recipes(paths)
    newest = recorded[max(recorded)]
    file = paths.recipe_toml
    return file.exists() and file.read_text("utf-8") != recipe_as_toml(newest) and recipe_of(paths) != newest


def _is_right(paths: RunPaths) -> bool:
    """Whether the file alone is a recipe; what is wrong is then in what was said beside it."""
    try:
        load([paths.recipe_toml], environ={})
    except RecipeError:
        return False
    return True
