"""Where a saved state comes from that another run starts from. Light."""

from dataclasses import dataclass
from pathlib import Path

from ppoctl.store import manifest as manifests
from ppoctl.store.manifest import Manifest


@dataclass(frozen=True)
class SavedBy:
    """The run that saved a state, and when."""

    run: str
    """Path of the run directory."""
    role: str
    step: int
    lineage: str


def saved_by(folder: Path) -> SavedBy | None:
    """The run that saved the state in this folder, wherever the command stands; None: it is no saved state. Raises
    CorruptArtifactError where its manifest is not as it was written."""
    manifest = state_manifest(folder)
    if manifest is None:
        return None
    root = folder.resolve().parent.parent.parent
    return SavedBy(str(root), manifest.stage.partition("/")[2], manifest.step, manifest.identity)


def state_manifest(folder: Path) -> Manifest | None:
    """The manifest of a saved state; None: the folder is none. Raises as `saved_by` does."""
    manifest = manifests.read(folder)
    return manifest if manifest is not None and manifest.stage.startswith("state/") else None
