"""Properties of a critic's saved state that are known only to the run that saved it: tokenizer, time of deletion."""

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
    """Return the folder of the model that the critic of a saved state was created from; None if it is unknown here.

    Raises CorruptArtifactError if the state's manifest is damaged.
    """
    recipe = _recipe_of(saved_by(state))
    return None if recipe is None else local_folder(model_of(recipe, "critic").path)


def require_kept(recipe: Recipe) -> None:
    """Raise RecipeError if the critic would start from a state that will be deleted by the run which saved it.

    The state must remain, because a resume of the new run reads it again.
    """
    if recipe.model.critic is None:
        return
    folder = model_folder(recipe.model.critic.path)
    origin = saved_by(folder)
    other = _recipe_of(origin)
    if origin is None or origin.run is None or other is None or other.checkpoint.keep_last is None:
        return
    saved = saved_steps(RunPaths(Path(origin.run)), ("actor", "critic"))
    if max(saved, default=0) >= other.steps:
        return
    copy = Path(f"critic-{origin.step}")
    raise RecipeError(
        f"`model.critic.path` is `{folder}`, and run `{origin.run}` has done {max(saved, default=0)} of its "
        f"{other.steps} steps: it keeps only its last {other.checkpoint.keep_last} states and will delete this one, "
        "which a resume of the new run reads",
        hint=f"cp -a {quoted(folder)} {quoted(copy)}  # and --set model.critic.path={quoted(copy)}",
    )


def _recipe_of(origin: SavedBy | None) -> Recipe | None:
    """Return the newest recipe of the run that saved a state; None if it cannot be read here."""
    if origin is None or origin.run is None:
        return None
    try:
        by_step = run_dir.recipes(RunPaths(Path(origin.run)))
        return from_resolved(by_step[max(by_step)])
    except PpoctlError:
        return None
