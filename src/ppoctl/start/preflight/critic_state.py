"""Properties of a saved state, from which a critic or a reference is loaded, that are known only to the run that
saved it: tokenizer, time of deletion."""

from pathlib import Path

from ppoctl.algorithms.role_model import model_of, own_models
from ppoctl.core.errors import PpoctlError, RecipeError, quoted
from ppoctl.models.convert.frozen_base import completing_folder, read_frozen_base
from ppoctl.models.folder import local_folder, model_folder
from ppoctl.recipe.loading.load import from_resolved
from ppoctl.recipe.schema import Recipe
from ppoctl.store.append import intact
from ppoctl.store.liveness import ended_early
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.saved_by import SavedBy, saved_by


def tokenizer_folder(state: Path) -> Path | None:
    """Return the folder of the model that the role of a saved state started from; None if it is unknown here.

    Raises CorruptArtifactError if the state's manifest is damaged.
    """
    origin = saved_by(state)
    recipe = _recipe_of(origin)
    return None if origin is None or recipe is None else local_folder(model_of(recipe, origin.role).path)


def require_kept(recipe: Recipe) -> None:
    """Raise RecipeError if a role would start from a state that will be deleted by the run which saved it.

    The state must remain, because a resume of the new run reads it again.
    """
    for role, table in own_models(recipe).items():
        state = model_folder(table.path)
        _require_kept(role, state, state)


def _require_kept(role: str, state: Path, folder: Path) -> None:
    """Raise RecipeError if `folder` will be deleted: the state, or a state with its frozen weights."""
    if (frozen := read_frozen_base(folder)) is not None:
        _require_kept(role, state, completing_folder(folder, frozen))
    origin = saved_by(folder)
    other = _recipe_of(origin)
    if origin is None or origin.run is None or other is None or other.checkpoint.keep_last is None:
        return
    paths = RunPaths(Path(origin.run))
    saved, lines = paths.saved_steps(*other.trained), intact(paths.journal)
    if max(saved, default=0) >= other.steps or ended_early(lines) is not None:
        return
    copy, key = Path(f"{role}-{origin.step}"), f"model.{role}.path"
    copying = f"cp -a {quoted(folder)} {quoted(copy)}"
    if folder != state:
        copying = f"ppoctl convert-ckpt {quoted(state)} {quoted(copy)} --to hf"
    through = "" if folder == state else f", which has its frozen weights from `{folder}`"
    raise RecipeError(
        f"`{key}` is `{state}`{through}, and run `{origin.run}` has done {max(saved, default=0)} of its "
        f"{other.steps} steps: it keeps only its last {other.checkpoint.keep_last} states and will delete this one, "
        "which a resume of the new run reads",
        hint=f"{copying}  # and --set {key}={quoted(copy)}",
    )


def _recipe_of(origin: SavedBy | None) -> Recipe | None:
    """Return the newest recipe of the run that saved a state; None if it cannot be read here."""
    if origin is None or origin.run is None:
        return None
    try:
        return from_resolved(RecordedRun(RunPaths(Path(origin.run))).recipe)
    except PpoctlError:
        return None
