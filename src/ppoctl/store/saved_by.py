"""Origin of a saved state from which another run starts. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from ppoctl.store import manifest as manifests
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True)
class SavedBy:
    """The run that saved a state, and the state's role, step and lineage."""

    run: str | None
    """Path of the run directory; None: the state is a copy outside a run directory."""
    role: str
    step: int
    lineage: str


def saved_by(folder: Path) -> SavedBy | None:
    """Return the origin of the state in this folder; None if the folder is not a saved state.

    The result does not depend on the working directory. Raises CorruptArtifactError if the manifest was changed after
    it was written.
    """
    manifest = state_manifest(folder)
    if manifest is None:
        return None
    role, location = manifest.stage.partition("/")[2], folder.resolve()
    paths = RunPaths(location.parent.parent.parent)
    is_in_run = paths.run_json.is_file() and location == paths.state(role, manifest.step)
    return SavedBy(str(paths.root) if is_in_run else None, role, manifest.step, manifest.identity)


def state_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a saved state; None for any other folder. Raises the errors of `saved_by`."""
    manifest = manifests.read(folder)
    return manifest if manifest is not None and manifest.stage.startswith("state/") else None
