"""Moving tensors out of a device's memory and back, without anyone who holds them noticing.

What moves is storage, not tensors: parameters, buffers, views of them in optimizers and in Megatron-Core's buckets
stay the objects they are, and find their numbers again when these are back. Megatron-Core has calls of its own for
this, three of them, each for a part, which look at CUDA tensors only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, UntypedStorage

from ppoctl.engines.megatron.pinned_memory import PinnedMemory


@dataclass
class _OffloadedStorage:
    """One storage whose memory was given back."""

    storage: UntypedStorage
    bytes: int
    host: Tensor | None
    """Its content; None: zeros will do."""


class HostOffload:
    """What has been moved to the host, by part. Each part's host memory stays its own and is written again when it
    leaves the next time."""

    def __init__(self) -> None:
        self._away: dict[str, list[_OffloadedStorage]] = {}
        self._kept: dict[str, list[PinnedMemory]] = {}
        """Host memory by part: a piece for each time that tensors left since the part was here."""
        self._filled: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """Size of all host memory."""
        return sum(piece.bytes.nbytes for pieces in self._kept.values() for piece in pieces)

    def offload(self, part: str, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Free the device's memory of these tensors, which nobody may then read. Without `keep` they come back as
        zeros. Tensors that share storage go together, with the first part that has them. Raises OutOfMemoryError."""
        found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        storages = [storage for storage in found.values() if storage.nbytes() > 0]
        hosts = self._hosts(part, storages) if keep else [None] * len(storages)
        for storage, host in zip(storages, hosts, strict=True):
            if host is not None:
                host.copy_(_numbers(storage))
            self._away.setdefault(part, []).append(_OffloadedStorage(storage, storage.nbytes(), host))
            storage.resize_(0)

    def reload(self, part: str) -> None:
        """Everything as it was; nothing where it is here."""
        for one in self._away.pop(part, []):
            one.storage.resize_(one.bytes)
            numbers = _numbers(one.storage)
            if one.host is None:
                numbers.zero_()
            else:
                numbers.copy_(one.host)
        self._filled[part] = 0

    def _hosts(self, part: str, storages: Sequence[UntypedStorage]) -> list[Tensor]:
        """Host memory for each of these, in one piece."""
        if not storages:
            return []
        sizes = [storage.nbytes() for storage in storages]
        places = side_by_side(sizes)
        pieces, number = self._kept.setdefault(part, []), self._filled[part]
        self._filled[part] += 1
        if number < len(pieces) and pieces[number].bytes.nbytes < places[-1]:
            del pieces[number:]  # before the larger one is there
        if number == len(pieces):
            pieces.append(PinnedMemory(places[-1], storages[0].device))
        memory = pieces[number].bytes
        return [memory[place : place + size] for place, size in zip(places, sizes, strict=False)]


_ALIGNED_BYTES = 256
"""Where a tensor's bytes may begin: what the GPU's own memory does."""


def side_by_side(sizes: Sequence[int]) -> list[int]:
    """Where each of so many bytes begins in one piece of memory, and at last the size of the piece."""
    return [0, *accumulate(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes)]


def _numbers(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
