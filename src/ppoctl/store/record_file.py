"""Reader of committed records: verifies their files, and returns their tensors as numpy arrays.

Imports numpy but not torch, which takes seconds to import and is not needed for reading.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from ppoctl.core.batch import record_header
from ppoctl.core.batch.digest import FileDigest
from ppoctl.core.batch.fields import FIELDS
from ppoctl.core.errors import StorageError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RECORD, RunPaths


@dataclass(frozen=True)
class PlainRecord:
    """A committed record: its fields by their names in `batch.records`."""

    kind: str
    fields: dict[str, Any]
    """Tensors as numpy arrays, and metadata. Fields with their default value are absent."""

    def get(self, name: str) -> Any:
        """Return the field, or None if it is absent."""
        return self.fields.get(name)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def read(paths: RunPaths, step: int, stage: str) -> PlainRecord | None:
    """Return the committed record of a stage; None if it is not committed.

    Raises CorruptArtifactError naming the file; StorageError if another version of ppoctl wrote it.
    """
    manifest = manifests.read(paths.stage(step, stage))
    if manifest is None:
        return None
    data = verified(paths, step, stage, manifest)
    try:
        kind, meta = record_header.record_metadata(data)
        found = {**meta, **_arrays(data)}
        missing = required(kind) - found.keys() if kind in FIELDS else {kind}
        if missing:
            raise ValueError(f"a record of kind `{kind}` without `{min(missing)}`")
    except ValueError as error:
        raise unknown(paths, step, stage, error) from error
    return PlainRecord(kind, found)


def required(kind: str) -> set[str]:
    """Return the fields that every record of the kind has. Raises KeyError if there is no such kind."""
    return {field.name for field in FIELDS[kind] if not field.is_optional}


def verified(paths: RunPaths, step: int, stage: str, manifest: Manifest) -> bytes:
    """Return the bytes of a committed record after all files of its artifact were compared with the manifest.

    Raises CorruptArtifactError naming the file that differs.
    """
    folder = paths.stage(step, stage)
    for name in manifest.files:
        if name != RECORD:
            manifests.verify_bytes(folder / name, manifests.digest_of(folder / name), manifest.files[name])
    data = manifests.contents(folder / RECORD)
    digest = FileDigest(hashlib.sha256(data).hexdigest(), len(data))
    manifests.verify_bytes(folder / RECORD, digest, manifest.files.get(RECORD, FileDigest("", 0)))
    return data


def unknown(paths: RunPaths, step: int, stage: str, error: ValueError) -> StorageError:
    """Return the error for a record that another version of ppoctl wrote."""
    path = paths.stage(step, stage) / RECORD
    return StorageError(
        f"`{path}` was written by another version of ppoctl, and this version cannot read it: {error}",
        hint="continue with the version that wrote it, which this command prints: "
        f"ppoctl show {quoted(paths.root)} --step {step} --manifest",
    )


def _arrays(data: bytes) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return {name: array for name, array in load(data).items() if name != record_header.KEY}
    except SafetensorError as error:
        raise ValueError("not a record file") from error
