"""What the saved state of a critic does not say itself, and its run does: its tokenizer, and how long it stays."""

from pathlib import Path

from ppoctl.errors import PpoctlError, RecipeError, quoted
from ppoctl.loading.load import from_resolved
from ppoctl.model.folder import local_folder, model_folder
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import Recipe
from ppoctl.store import run_dir
from ppoctl.store.retention import saved_steps
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.saved_by import SavedBy, saved_by


def tokenizer_folder(state: Path) -> Path | None:
    """Folder of the model that the state's run made its critic from; None where that is not known here. Raises
    CorruptArtifactError where the state's manifest is not as it was written."""
    recipe = _recipe_of(saved_by(state))
    return None if recipe is None else local_folder(model_of(recipe, "critic").path)


def require_kept(recipe: Recipe) -> None:
    """Raise RecipeError where the critic would start from a state that its own run deletes as it goes on: a resume
    reads it again."""
    if recipe.model.critic is None:
        return
    folder = model_folder(recipe.model.critic.path)
    came = saved_by(folder)
    theirs = _recipe_of(came)
    if came is None or came.run is None or theirs is None or theirs.checkpoint.keep_last is None:
        return
    saved = saved_steps(RunPaths(Path(came.run)), ("actor", "critic"))
    if max(saved, default=0) >= theirs.steps:
        return
    copy = Path(f"critic-{came.step}")
    raise RecipeError(
        f"`model.critic.path` is `{folder}`, and run `{came.run}` has done {max(saved, default=0)} of its "
        f"{theirs.steps} steps: as it goes on it keeps its last {theirs.checkpoint.keep_last} states and deletes "
        "this one, which a resume of the new run reads",
        hint=f"cp -a {quoted(folder)} {quoted(copy)}  # and --set model.critic.path={quoted(copy)}",
    )


def _recipe_of(came: SavedBy | None) -> Recipe | None:
    """The newest recipe of the run that saved a state; None where that cannot be read here."""
    if came is None or came.run is None:
        return None
    try:
        found = run_dir.recipes(RunPaths(Path(came.run)))
        return from_resolved(found[max(found)])
    except PpoctlError:
        return None
