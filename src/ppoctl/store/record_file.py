"""Files of committed records, verified, and their contents as numpy arrays. Light but for numpy: torch takes seconds
to import, and whoever only reads has no need of it."""

import hashlib
from dataclasses import dataclass
from typing import Any

from ppoctl.batch import record_header
from ppoctl.batch.digest import FileDigest
from ppoctl.errors import StorageError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RECORD, RunPaths


@dataclass(frozen=True)
class PlainRecord:
    """One committed record: its fields by name, as `batch.records` names them."""

    kind: str
    fields: dict[str, Any]
    """Tensors as numpy arrays, and metadata. One that has its default is not here."""

    def get(self, name: str) -> Any:
        """The field, or None."""
        return self.fields.get(name)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


FIELDS = {
    "rollouts": {
        "prompt_tokens", "prompt_lengths", "tokens", "lengths", "mask", "sampler_logprobs", "finish", "prompt_ids",
        "sample_indices", "texts", "stamps",
    },
    "rewards": {"scores", "outcomes", "truths"},
    "values": {"values"},
    "logprobs": set(),
    "advantages": {"advantages", "mask"},
    "evaluation": {"rows"},
}  # fmt: skip
"""Kinds that are read in this way, and fields that readers take for granted."""


def read(paths: RunPaths, step: int, stage: str) -> PlainRecord | None:
    """The committed record of a stage; None where none is committed. Raises CorruptArtifactError naming the file,
    StorageError where another version of ppoctl wrote it."""
    manifest = manifests.read(paths.stage(step, stage))
    if manifest is None:
        return None
    data = verified(paths, step, stage, manifest)
    try:
        kind, meta = record_header.record_metadata(data)
        missing = FIELDS[kind] - (found := {**meta, **_arrays(data)}).keys() if kind in FIELDS else {kind}
        if missing:
            raise ValueError(f"a record of kind `{kind}` without `{min(missing)}`")
    except ValueError as error:
        raise unknown(paths, step, stage, error) from error
    return PlainRecord(kind, found)


def verified(paths: RunPaths, step: int, stage: str, manifest: Manifest) -> bytes:
    """The bytes of a committed record, all files of its artifact compared with the manifest. Raises
    CorruptArtifactError naming the file that differs."""
    folder = paths.stage(step, stage)
    for name in manifest.files:
        if name != RECORD:
            manifests.verify_bytes(folder / name, manifests.digest_of(folder / name), manifest.files[name])
    data = manifests.contents(folder / RECORD)
    found = FileDigest(hashlib.sha256(data).hexdigest(), len(data))
    manifests.verify_bytes(folder / RECORD, found, manifest.files.get(RECORD, FileDigest("", 0)))
    return data


def unknown(paths: RunPaths, step: int, stage: str, error: ValueError) -> StorageError:
    """The error for a record that another version of ppoctl wrote."""
    path = paths.stage(step, stage) / RECORD
    return StorageError(
        f"`{path}` was written by a version of ppoctl that this one does not know: {error}",
        hint="go on with the version that wrote it; which one, says: "
        f"ppoctl show {quoted(paths.root)} --step {step} --manifest",
    )


def _arrays(data: bytes) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return {name: array for name, array in load(data).items() if name != record_header.KEY}
    except SafetensorError as error:
        raise ValueError("not a record file") from error
