"""How a rank writes its shard of a state: torch's distributed-checkpoint writer, in three phases.

    plan     collective                      which rank writes which tensors; in the background: copies of this rank's
    write    per rank, here or in a thread   this rank's file, digested while it is written
    finish   collective                      the list of written tensors, in the metadata files

Megatron-Core's default writer starts a helper process and forks. That does not work in a process with a vLLM engine
or in an interactive process. The files are the same as with the default writer.
"""

import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from ppoctl.core.batch.digest import DigestingFile, FileDigest, flushed_digest

COMMON_FILES = ("metadata.json", "common.pt")
"""Files that Megatron-Core's first rank writes in addition to the tensor files and their `.metadata`."""


class StateWriter(TorchDistSaveShardedStrategy):
    """The writer of one state. It is passed to `dist_checkpointing.save`."""

    def __init__(self, copied: Callable[[Tensor], Tensor] | None = None) -> None:
        """`copied` copies a tensor that may change while the files are written. None: no tensor changes."""
        super().__init__("torch_dist", 1)
        self.copied = copied
        self.files = _DigestedFiles()

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> AsyncRequest:
        """Plan the save. The request's `async_fn` writes the files, in any thread. The request's last function
        finishes the save."""
        translated, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        state = mcore_to_pyt_state_dict(translated, is_loading=False)
        writer = FileSystemWriter(checkpoint_dir, sync_files=False)  # closing a `DigestingFile` flushes
        writer.fs = self.files
        ranks = _DistWrapper(None, use_dist=True, coordinator_rank=0)
        # As in Megatron-Core: copies of other ranks were left out above, so torch need not look for them.
        planner: Any = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        plan, metadata = _plan_together(state, planner, writer, ranks)
        source: Any = planner if self.copied is None else _Copies(plan, planner, self.copied)
        self.copied = None  # frees the pinned memory that `copied` uses
        written: Future[list[WriteResult]] = Future()

        def write() -> None:
            try:
                written.set_result(writer.write_data(plan, source).value())
            except BaseException as error:  # noqa: BLE001 - raised by `finish`, on all ranks
                written.set_exception(error)

        def finish() -> None:
            ranks.all_reduce("write", written.result, lambda results: writer.finish(metadata[0], results))

        return AsyncRequest(write, (), [finish])


class RankSaving:
    """A save of one rank that is planned and not finished."""

    def __init__(self, request: AsyncRequest, files: "_DigestedFiles", *, in_background: bool) -> None:
        self._request = request
        self._files = files
        # A daemon thread does not keep the process alive. A partial save has no manifest, so it is never used.
        self._thread = threading.Thread(target=request.async_fn, name="save", daemon=True)
        self._thread.start()
        if not in_background:
            self._thread.join()

    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def finish(self, folder: Path) -> dict[str, FileDigest]:
        """Wait for all ranks. Returns the files that this rank has written into `folder`. Collective."""
        self._thread.join()
        for finish in self._request.finalize_fns:
            finish()
        if torch.distributed.get_rank() == 0:
            for name in COMMON_FILES:  # small files, which Megatron-Core writes without our writer
                self._files.digests[name] = flushed_digest(folder / name)
        return self._files.digests


def _plan_together(
    state: dict[str, Any], planner: SavePlanner, writer: FileSystemWriter, ranks: _DistWrapper
) -> tuple[SavePlan, list[Metadata]]:
    """Return the tensors that this rank writes and, only on the first rank, the metadata of all ranks."""
    metadata: list[Metadata] = []

    def local_step() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator)
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_step(plans: list[SavePlan]) -> list[SavePlan]:
        plans, global_metadata = planner.create_global_plan(plans)
        metadata.append(global_metadata)
        return writer.prepare_global_plan(plans)

    return planner.finish_plan(ranks.reduce_scatter("plan", local_step, global_step)), metadata


class _Copies:
    """Copies of this rank's shard of a state in host memory. Each item is returned once and then freed."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, copied: Callable[[Tensor], Tensor]) -> None:
        resolved = ((item.index, planner.resolve_data(item)) for item in plan.items)
        # Objects are not copied: they were pickled for this save only.
        self._items = {index: copied(data) if isinstance(data, Tensor) else data for index, data in resolved}

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        return self._items.pop(item.index)


class _DigestedFiles(FileSystem):
    """File system that digests files while they are written, and flushes them when they are closed."""

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the caller of the save has created the folder. torch would re-create the folder and its parents
        after a newer attempt has moved the folder away."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", "a state writer only writes"
        # On a full disk torch reports a broken archive. Closing the file raises the actual error.
        with closing(DigestingFile(Path(path))) as file:
            yield file
        self.digests[Path(path).name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)
