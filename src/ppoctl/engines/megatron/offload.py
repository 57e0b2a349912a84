"""Offloading of tensors to host memory, and reloading, without changing the tensor objects.

Only the storage is moved: parameters, buffers, and views of them in optimizers and in Megatron-Core's buckets remain
the same objects and have their values again after the reload. Megatron-Core's three functions for offloading each
handle only some of the tensors, and only CUDA tensors.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, UntypedStorage

from ppoctl.core.measured import MEASUREMENTS
from ppoctl.engines.megatron.pinned_memory import PinnedMemory


@dataclass
class _OffloadedStorage:
    """One storage whose device memory was freed."""

    storage: UntypedStorage
    bytes: int
    host: Tensor | None
    """Content of the storage. None: the storage is reloaded as zeros."""


class HostOffload:
    """Offloaded tensors, by part. The host memory of each part is kept after a reload, and reused when the part is
    offloaded again."""

    def __init__(self) -> None:
        self._offloaded: dict[str, list[_OffloadedStorage]] = {}
        self._kept: dict[str, list[PinnedMemory]] = {}
        """Host buffers of each part: one buffer for each `offload` call since the part was last reloaded."""
        self._filled: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """Total size of the host memory."""
        return sum(piece.bytes.nbytes for pieces in self._kept.values() for piece in pieces)

    def offload(self, part: str, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Free the device memory of these tensors, which must not be read until the reload. Without `keep`, the
        tensors are reloaded as zeros. Tensors that share storage are offloaded together, with the first part that
        contains one of them. Raises OutOfMemoryError."""
        by_address = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        storages = [storage for storage in by_address.values() if storage.nbytes() > 0]
        hosts = self._hosts(part, storages) if keep else [None] * len(storages)
        for storage, host in zip(storages, hosts, strict=True):
            if host is not None:
                host.copy_(_numbers(storage))
            self._offloaded.setdefault(part, []).append(_OffloadedStorage(storage, storage.nbytes(), host))
            storage.resize_(0)

    def reload(self, part: str) -> None:
        """Restore all tensors of the part. Does nothing if the tensors are on the device."""
        with MEASUREMENTS.moving():
            for offloaded in self._offloaded.pop(part, []):
                offloaded.storage.resize_(offloaded.bytes)
                numbers = _numbers(offloaded.storage)
                if offloaded.host is None:
                    numbers.zero_()
                else:
                    numbers.copy_(offloaded.host)
        self._filled[part] = 0

    def _hosts(self, part: str, storages: Sequence[UntypedStorage]) -> list[Tensor]:
        """Return host memory for each of these storages, in one buffer."""
        if not storages:
            return []
        sizes = [storage.nbytes() for storage in storages]
        offsets = side_by_side(sizes)
        buffers, number = self._kept.setdefault(part, []), self._filled[part]
        self._filled[part] += 1
        if number < len(buffers) and buffers[number].bytes.nbytes < offsets[-1]:
            del buffers[number:]  # free them before the larger buffer is allocated
        if number == len(buffers):
            buffers.append(PinnedMemory(offsets[-1], storages[0].device))
        memory = buffers[number].bytes
        return [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]


_ALIGNED_BYTES = 256
"""Alignment of tensors in host memory, in bytes. The GPU allocator uses the same alignment."""


def side_by_side(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of blocks of these sizes in one buffer, followed by the size of the buffer."""
    return [0, *accumulate(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes)]


def _numbers(storage: UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
