"""Checkpoint that `eval` evaluates, found by its path. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ppoctl.algorithms.roles import POLICY
from ppoctl.core.errors import RecipeError, quoted
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe
from ppoctl.run.run_recipe import recipe_of
from ppoctl.run.wire.sources import clock_of, run_of, same_companions
from ppoctl.store import manifest as manifests
from ppoctl.store.manifest import Manifest
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

if TYPE_CHECKING:
    from ppoctl.core.batch.records import State


@dataclass(frozen=True)
class Checkpoint:
    """Weights in a folder that `eval --ckpt` evaluates, and the recipe of the evaluation."""

    recipe: Recipe
    folder: Path
    """Folder of a saved Megatron state, or model folder. A model folder is then the recipe's model source."""
    manifest: Manifest | None
    """Manifest of the state; None: a model folder."""
    clock: datetime | None = None
    """Local time that chat templates read: that of the run; None: now."""

    @property
    def state(self) -> "State":
        """State that is evaluated."""
        from ppoctl.core.batch.lineage import initial_state
        from ppoctl.core.batch.records import State

        saved = self.manifest
        if saved is None:
            return initial_state(POLICY, str(self.folder))
        return State(POLICY, saved.step, int(saved.extra["updates"]), saved.identity)


def find_checkpoint(path: Path, files: Sequence[Path], sets: Sequence[str]) -> Checkpoint:
    """Return the checkpoint at a path: a run directory (its newest state), a folder `states/actor/N` of a run, or a
    Hugging Face folder with a recipe.

    Raises RecipeError if it is none of these, and StorageError if the model source of a run has changed.
    """
    if (path / "run.json").is_file():
        run = RecordedRun(RunPaths(path))
        if not run.saved_steps:
            raise RecipeError(f"run `{path}` has no saved state yet", hint=f"ppoctl status {quoted(path)}")
        path = run.paths.state(POLICY, run.last_saved)
    manifest = manifests.read(path)
    if manifest is not None and manifest.stage == f"state/{POLICY}":
        run = RecordedRun(run_of(path))
        recipe = load(files, sets, environ={}).recipe if files else recipe_of(run, sets)
        manifests.verify(path, manifest)
        if not run.paths.run_json.is_file():
            return Checkpoint(recipe, path, manifest)
        same_companions(run, recipe, POLICY)
        return Checkpoint(recipe, path, manifest, clock_of(run))
    if (path / "config.json").is_file():
        recipe = load(files, [*sets, f"model.path={path.resolve()}"]).recipe
        return Checkpoint(recipe, path.resolve(), None)
    raise RecipeError(
        f"`{path}` is not a run, a saved actor state, or a model folder",
        hint=f"list its files: ls {quoted(path)}",
    )
