"""Megatron-Core's loader of torch_dist folders, without executing code from them.

By default, Megatron-Core's loader unpickles all of `.metadata`, and every part of a state that is not a tensor. Here
`.metadata` comes from `convert.torch_dist`, which reads the file once and accepts only descriptions of tensors. Other
objects are loaded by `convert.safe_pickle`.
"""

import io
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load_state_dict

from ppoctl.models.convert.safe_pickle import load_plain, why

COMMON = "common.pt"


class DataOnly(TorchDistLoadShardedStrategy):
    """The loader of one folder, passed to `dist_checkpointing.load`. Methods raise the errors of torch and
    Megatron-Core."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> dict[str, Any]:
        """Load as Megatron-Core's strategy does, but with the reader and planner of this module."""
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        by_key, flat, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(by_key, is_loading=True)
        planner = _Planner(
            shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch
            },
        )
        load_state_dict(state, _ChunkReader(checkpoint_dir, self._metadata), planner=planner)
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat, renamed)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_sharded_metadata(self, checkpoint_dir: Path | str) -> dict[str, Any]:
        """Return the metadata of all tensors and other objects in the folder."""
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, BytesStorageMetadata)
        ]
        found: dict[str, Any] = self.load_tensors_metadata(checkpoint_dir, self._metadata)
        return {**{stored.unique_key: stored for stored in objects}, **found}


class CommonDataOnly(TorchCommonLoadStrategy):
    """The loader of `common.pt`, passed to `dist_checkpointing.load`."""

    def load_common(self, checkpoint_dir: Path | str) -> dict[str, Any]:
        """Return the objects that are not tensors. Raises UnpicklingError with a one-line message, and OSError."""
        try:
            common = load_plain(Path(checkpoint_dir) / COMMON)
        except (RuntimeError, EOFError, ValueError, UnpicklingError) as error:
            raise UnpicklingError(f"`{COMMON}`: {why(error)}") from error
        if not isinstance(common, dict):
            raise UnpicklingError(f"`{COMMON}`: does not contain a dict")
        return common


class _ChunkReader(FileSystemReader):
    """Reader of chunks of tensors. It does not read metadata from a file."""

    def __init__(self, folder: Path | str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """Return the metadata that was passed to the constructor. The method has no rank parameter, so that torch
        does not look for files of single ranks."""
        return self._metadata


class _Planner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store the bytes of an object that is not a tensor. torch would unpickle the object, which could execute
        code."""
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], load_plain(value))


def causes(error: CheckpointException) -> str:
    """Return the errors of all ranks in one line."""
    return "; ".join(f"{type(cause).__name__}: {why(cause)}" for cause, _ in error.failures.values())
