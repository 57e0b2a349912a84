"""The manifest: the only definition of *complete*, read by one function, for data and states alike. Light."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ppoctl.batch.digest import FileDigest, file_digest
from ppoctl.errors import CorruptArtifactError, StorageError
from ppoctl.store.layout import MANIFEST


@dataclass(frozen=True)
class Manifest:
    """What an artifact is, what it was made from, and what it looked like."""

    stage: str
    """Stage name, or `state/ROLE`."""
    step: int
    identity: str
    """Content digest of a data artifact; lineage of a state."""
    inputs: tuple[str, ...]
    """Identity of each input, in the order of the stage's signature."""
    fingerprint: str
    """Of the result keys that the stage reads."""
    files: dict[str, FileDigest]
    seconds: float
    committed_at: float
    """Unix seconds."""
    attempt: int
    figures: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """States: `updates`, `carry`, `replay`, `healthy`, `layout`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Manifest":
        raw = json.loads(text)
        raw["files"] = {name: FileDigest(**entry) for name, entry in raw["files"].items()}
        raw["inputs"] = tuple(raw["inputs"])
        return Manifest(**raw)


def read(folder: Path) -> Manifest | None:
    """The manifest of a committed artifact, or None where none is committed.

    Raises CorruptArtifactError when the manifest itself cannot be read.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read `{path}`: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _corrupt(path, "not a manifest") from error
    try:
        return Manifest.from_json(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _corrupt(path, "not a manifest") from error


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every file and compare; raises CorruptArtifactError naming the first that differs."""
    for name, expected in manifest.files.items():
        verify_bytes(folder / name, file_digest(folder / name), expected)


def verify_bytes(path: Path, found: FileDigest | None, expected: FileDigest) -> None:
    """Raise CorruptArtifactError when what was found is not what the manifest says."""
    if found is None:
        raise _corrupt(path, "missing")
    if found.size != expected.size:
        raise _corrupt(path, f"{found.size} bytes, its manifest says {expected.size}")
    if found.sha256 != expected.sha256:
        raise _corrupt(path, f"digest {found.sha256[:12]}, its manifest says {expected.sha256[:12]}")


def _corrupt(path: Path, what: str) -> CorruptArtifactError:
    folder = path.parent
    return CorruptArtifactError(
        f"`{path}` is corrupt: {what}",
        hint=f"remove it and resume; what depends on it is made again: rm -r {folder}",
    )
