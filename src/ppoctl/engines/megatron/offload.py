"""Moving tensors out of a device's memory and back, without anyone who holds them noticing.

What moves is storage, not tensors: parameters, buffers, views of them in optimizers and in Megatron-Core's buckets
stay the objects they are, and find their numbers again when these are back. Megatron-Core has calls of its own for
this, three of them, each for a part, which look at CUDA tensors only.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage


@dataclass
class _Away:
    """One storage whose memory was given back."""

    storage: UntypedStorage
    bytes: int
    host: Tensor | None
    """Its content; None: zeros will do."""


class HostMemory:
    """What has been moved to the host, by part."""

    def __init__(self) -> None:
        self._away: dict[str, list[_Away]] = {}

    def take(self, part: str, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Free the device's memory of these tensors, which nobody may then read. Without `keep` they come back as
        zeros. Tensors that share storage go together, with the first part that has them."""
        away = self._away.setdefault(part, [])
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            away.append(_Away(storage, storage.nbytes(), _copied(storage) if keep else None))
            storage.resize_(0)

    def bring_back(self, part: str) -> None:
        """Everything as it was; nothing where it is here."""
        for one in self._away.pop(part, []):
            one.storage.resize_(one.bytes)
            numbers = _numbers(one.storage)
            if one.host is None:
                numbers.zero_()
            else:
                numbers.copy_(one.host)


def _numbers(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(storage: UntypedStorage) -> Tensor:
    numbers = _numbers(storage)
    # Pinned memory is copied from at the full speed of the bus.
    host = torch.empty(numbers.shape, dtype=torch.uint8, pin_memory=numbers.is_cuda)
    return host.copy_(numbers)
