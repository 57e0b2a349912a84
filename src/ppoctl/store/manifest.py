"""The manifest of an artifact. An artifact is complete if it has a manifest; only `read` checks this.

Data and states have the same kind of manifest. Imports no torch.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.core.batch.digest import FileDigest, file_digest
from ppoctl.core.batch.sealed_json import ChecksumMismatchError, repair_hint, seal, unseal
from ppoctl.core.errors import CorruptArtifactError, quoted
from ppoctl.store.disk_errors import require_format, storage_error
from ppoctl.store.run_paths import FORMAT, MANIFEST

if TYPE_CHECKING:
    from ppoctl.core.batch.records import State

DIGEST_THREADS = 8
"""Number of files that are read in parallel."""


@dataclass(frozen=True)
class Manifest:
    """Description of an artifact: its name, its inputs, and the digests of its files."""

    stage: str
    """Stage name, or `state/ROLE`."""
    step: int
    identity: str
    """Content digest of a data artifact; lineage of a state."""
    inputs: tuple[str, ...]
    """Identity of each input, in the order of the stage's signature."""
    fingerprint: str
    """Fingerprint of the keys that the stage reads and that affect results."""
    files: dict[str, FileDigest]
    seconds: float
    committed_at: float
    """Time of the commit, in unix seconds."""
    attempt: int
    figures: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields. A state has `updates`, `carry`, `replay`, `healthy`, `at_stop`, `layout`."""

    def to_text(self) -> str:
        """Return the text of the file: JSON that ends with its own checksum."""
        return seal({"format": FORMAT, **asdict(self)}, indent=1)


def of_state(
    stage: str, state: "State", extra: Mapping[str, Any], attempt: int, versions: Mapping[str, str]
) -> Manifest:
    """Return the manifest of a state that is written now, without the list of its files."""
    return Manifest(
        stage=stage,
        step=state.step,
        identity=state.lineage,
        inputs=(),
        fingerprint="",
        files={},
        seconds=0.0,
        committed_at=time.time(),
        attempt=attempt,
        versions=dict(versions),
        extra=dict(extra),
    )


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a committed artifact, or None if no artifact is committed.

    Raises CorruptArtifactError if the manifest was changed after it was written; StorageError if it cannot be read or
    another version of ppoctl wrote it.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("ascii")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    except UnicodeDecodeError as error:
        raise _corrupt(path, "not a manifest") from error
    try:
        raw = unseal(text)
        require_format(path, raw.pop("format"))
        raw["files"] = {name: FileDigest(**entry) for name, entry in raw["files"].items()}
        raw["inputs"] = tuple(raw["inputs"])
        return Manifest(**raw)
    except ChecksumMismatchError as error:
        raise _corrupt(path, str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _corrupt(path, f"not a manifest: {error}") from error


def require(folder: Path) -> Manifest:
    """Return the manifest of an artifact that must exist.

    Raises CorruptArtifactError if the manifest is missing, and the errors of `read`.
    """
    manifest = read(folder)
    if manifest is None:
        raise _corrupt(folder / MANIFEST, "missing")
    return manifest


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every file and compare its digest. Raises CorruptArtifactError naming the first file that differs."""
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:  # hashing releases the GIL; a 7B checkpoint has 200 GB
        digests = pool.map(lambda name: digest_of(folder / name), manifest.files)
        for (name, expected), digest in zip(manifest.files.items(), digests, strict=True):
            verify_bytes(folder / name, digest, expected)


def verify_bytes(path: Path, found: FileDigest | None, expected: FileDigest) -> None:
    """Raise CorruptArtifactError if the digest of a file differs from the digest in its manifest."""
    if found is None:
        raise _corrupt(path, "missing")
    if found.size != expected.size:
        raise _corrupt(path, f"{found.size} bytes, its manifest has {expected.size}")
    if found.sha256 != expected.sha256:
        raise _corrupt(path, f"digest {found.sha256[:12]}, its manifest has {expected.sha256[:12]}")


def digest_of(path: Path) -> FileDigest | None:
    """Return the digest of an artifact's file. Raises the same errors as `contents`."""
    with _readable(path):
        return file_digest(path)


def contents(path: Path) -> bytes:
    """Return the bytes of an artifact's file.

    Raises CorruptArtifactError if the file is missing or is a folder; StorageError if it cannot be read.
    """
    with _readable(path):
        return path.read_bytes()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise _corrupt(path, "a folder" if path.is_dir() else "missing") from error
    except OSError as error:
        raise storage_error(path, error, doing="read") from error


def _corrupt(path: Path, reason: str) -> CorruptArtifactError:
    """Return the error that names the file, with the command that repairs the run if the artifact is in a run."""
    folder = path.parent
    runs = [parent for parent in folder.parents if (parent / "run.json").is_file()]
    hint = repair_hint(runs[0]) if runs else f"copy it again from where it was created: ls -la {quoted(folder)}"
    return CorruptArtifactError(f"`{path}` is corrupt: {reason}", hint=hint)
