"""Where a saved state comes from that another run starts from. Light."""

from dataclasses import dataclass
from pathlib import Path

from ppoctl.store import manifest as manifests
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True)
class SavedBy:
    """The run that saved a state, and when."""

    run: str | None
    """Path of the run directory; None: the state is a copy that lies elsewhere."""
    role: str
    step: int
    lineage: str


def saved_by(folder: Path) -> SavedBy | None:
    """What saved the state in this folder, wherever the command stands; None: it is no saved state. Raises
    CorruptArtifactError where its manifest is not as it was written."""
    manifest = state_manifest(folder)
    if manifest is None:
        return None
    role, place = manifest.stage.partition("/")[2], folder.resolve()
    paths = RunPaths(place.parent.parent.parent)
    is_there = paths.run_json.is_file() and place == paths.state(role, manifest.step)
    return SavedBy(str(paths.root) if is_there else None, role, manifest.step, manifest.identity)


def state_manifest(folder: Path) -> Manifest | None:
    """The manifest of a saved state; None: the folder is none. Raises as `saved_by` does."""
    manifest = manifests.read(folder)
    return manifest if manifest is not None and manifest.stage.startswith("state/") else None
