"""Writer of a folder in Megatron's torch_dist format, one tensor at a time.

torch's own writer keeps every written tensor until the file is closed, so a conversion would need memory for the
whole model. The files have the same format: see `torch_dist`.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ppoctl.models.convert.torch_dist import BACKEND, METADATA

COMMON = "common.pt"
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class TorchDistWriter:
    """Writer of one torch_dist checkpoint in an existing folder. The checkpoint cannot be read before `finish`. Every
    method raises OSError."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._number = 0
        self._file = self._name(0).open("wb")
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, key: str, tensor: Tensor, leading: tuple[tuple[int, int], ...] = ()) -> None:
        """Add a whole tensor; or, with the (index, size) of leading dimensions (layers, experts), a slice of the
        tensor that all slices form together."""
        offsets = torch.Size([*(index for index, _ in leading), *(0 for _ in tensor.shape)])
        sizes = torch.Size([*(1 for _ in leading), *tensor.shape])
        stored = self._tensors.get(key)
        if stored is None:
            whole = torch.Size([*(size for _, size in leading), *tensor.shape])
            stored = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), whole, [])
            self._tensors[key] = stored
        assert stored.properties.dtype == tensor.dtype, f"slices of `{key}` have several dtypes"
        if self._file.tell() and self._file.tell() + tensor.nbytes > self._file_bytes:
            self.close()
            self._number += 1
            self._file = self._name(self._number).open("wb")
        begin = self._file.tell()
        chunk = tensor.reshape(sizes).contiguous()
        # torch.save writes the whole storage of a view, so a view is copied first.
        torch.save(chunk.clone() if chunk.untyped_storage().nbytes() != chunk.nbytes else chunk, self._file)
        place = _StorageInfo(self._name(self._number).name, begin, self._file.tell() - begin)
        self._places[MetadataIndex(key, offsets, len(stored.chunks))] = place
        stored.chunks.append(ChunkStorageMetadata(offsets, sizes))

    def close(self) -> None:
        self._file.close()

    def finish(self, common: dict[str, Any]) -> None:
        """Close the files and write their metadata, and `common` into a separate file."""
        self.close()
        metadata = Metadata(dict(self._tensors), storage_data=self._places, version=CURRENT_DCP_VERSION)
        torch.save(common, self._folder / COMMON)
        (self._folder / BACKEND).write_text(json.dumps(_BACKEND), "utf-8")
        with (self._folder / METADATA).open("wb") as file:
            pickle.dump(metadata, file)

    def _name(self, number: int) -> Path:
        return self._folder / f"__0_{number}.distcp"
