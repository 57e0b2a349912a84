"""Reader of a folder in Megatron's torch_dist format, written by any program. It reads one tensor at a time.

    .metadata          shape and dtype of every tensor; which file has which chunk of it
    __R_N.distcp       the chunks, one after the other, each as `torch.save` writes it
    metadata.json      names the format "torch_dist";  common.pt  everything except tensors (never read by ppoctl)

`.metadata` describes whole tensors: their shapes do not depend on the layout under which they were saved. `.metadata`
is a pickle, and a pickle can run any code. So only names that describe tensors are allowed, and chunks are loaded
with `weights_only`.
"""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from ppoctl.core.errors import StorageError, quoted
from ppoctl.models.convert.safe_pickle import load_plain, why

METADATA = ".metadata"
BACKEND = "metadata.json"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        "float32",
        "float16",
        "bfloat16",
        "float64",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "Path", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "Path", "PurePosixPath"},
}


class TorchDist:
    """Tensors of a torch_dist folder by their keys. Each tensor is read when it is requested. Raises StorageError if
    the folder is not a torch_dist checkpoint, is incomplete, or requires code to run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = read_metadata(folder)
        self._places: dict[MetadataIndex, Any] = self.metadata.storage_data
        described = self.metadata.state_dict_metadata.items()
        self.tensors = {key: stored for key, stored in described if isinstance(stored, TensorStorageMetadata)}

    def read(self, key: str, leading: tuple[int, ...] = ()) -> Tensor:
        """Return a copy of the tensor, or, with indices of its leading dimensions (layer, expert), of the slice at
        these indices.

        Chunks outside the slice are not read.
        """
        stored = self.tensors[key]
        whole = torch.empty(stored.size[len(leading) :], dtype=stored.properties.dtype)
        covered = 0
        for described in stored.chunks:
            offsets, sizes = described.offsets, described.sizes
            ranges = zip(leading, offsets, sizes, strict=False)
            if not all(start <= index < start + size for index, start, size in ranges):
                continue
            chunk = self._chunk(key, offsets, sizes)
            for index, start in zip(leading, offsets, strict=False):
                chunk = chunk[index - start]
            if chunk.shape == whole.shape:
                return chunk.clone() if chunk.untyped_storage().nbytes() != chunk.nbytes else chunk
            place = tuple(
                slice(start, start + size)
                for start, size in zip(offsets[len(leading) :], sizes[len(leading) :], strict=True)
            )
            whole[place] = chunk
            covered += chunk.numel()
        if covered != whole.numel():
            raise StorageError(
                f"`{key}` in `{self.folder}` is incomplete: it has {covered} of {whole.numel()} elements",
                hint=f"copy the checkpoint again: ls -la {quoted(self.folder)}",
            )
        return whole

    def _chunk(self, key: str, offsets: torch.Size, sizes: torch.Size) -> Tensor:
        place = self._places.get(MetadataIndex(key, offsets))
        if place is None:
            raise self._unreadable(key, "`.metadata` has no location for a chunk of it")
        path = self.folder / place.relative_path
        try:
            with path.open("rb") as file:
                file.seek(0, io.SEEK_END)
                if file.tell() < place.offset + place.length:
                    raise self._unreadable(key, f"`{path.name}` is truncated")
                view: Any = _create_file_view(file, place.offset, place.length)
                chunk = load_plain(view)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise self._unreadable(key, f"`{path.name}`: {why(error)}") from error
        dtype = self.tensors[key].properties.dtype
        if not isinstance(chunk, Tensor) or chunk.shape != sizes or chunk.dtype != dtype:
            raise self._unreadable(key, f"`{path.name}` contains other data at its position")
        return chunk

    def _unreadable(self, key: str, why: str) -> StorageError:
        return StorageError(
            f"tensor `{key}` in `{self.folder}` cannot be read: {why}",
            hint=f"copy the checkpoint again: ls -la {quoted(self.folder)}",
        )


def is_torch_dist(folder: Path) -> bool:
    """Whether the folder looks like a torch_dist checkpoint."""
    return (folder / METADATA).is_file() and (folder / BACKEND).is_file()


def read_metadata(folder: Path) -> Metadata:
    """Return the content of `.metadata`. It is read only once, because the file may be replaced later. Raises
    StorageError if it is incomplete, requires code to run, or names files outside the folder."""
    try:
        backend = json.loads((folder / BACKEND).read_text("utf-8"))["sharded_backend"]
        with (folder / METADATA).open("rb") as file:
            metadata = _TensorsOnly(file).load()
        files = [place.relative_path for place in metadata.storage_data.values()]
        outside = next((file for file in files if Path(file).name != file), None)
    except Exception as error:  # a damaged pickle fails in many ways
        raise _no_checkpoint(folder, why(error)) from error
    if backend != "torch_dist" or not isinstance(metadata, Metadata):
        raise StorageError(
            f"`{folder}` is in Megatron's `{backend}` format, not torch_dist",
            hint="save it with --ckpt-format torch_dist",
        )
    if outside is not None:
        raise _no_checkpoint(folder, f"`{METADATA}` names a file outside the folder: `{outside}`")
    return metadata


def _no_checkpoint(folder: Path, reason: str) -> StorageError:
    return StorageError(
        f"`{folder}` is not a complete torch_dist checkpoint: {reason}",
        hint=f"check that `{BACKEND}` and `{METADATA}` are complete: ls -la {quoted(folder)}",
    )


class _Ignored:
    """Placeholder for classes that some versions of Megatron-Core add to `.metadata`, and that the reader does not
    need."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _TensorsOnly(pickle.Unpickler):
    """Unpickler that builds only descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("megatron.core."):
            return _Ignored
        raise pickle.UnpicklingError(f"`{METADATA}` requires `{module}.{name}`, which no checkpoint needs")
