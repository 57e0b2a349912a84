"""Tensors through Ray's object store: one flat piece of shared memory for many, read in place by every process of a
node. (torch's own pickling would copy each tensor on both sides.)"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; each tensor starts at a multiple of it."""


@dataclass(frozen=True)
class FlatTensors:
    """Named tensors, one after the other in `data`."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    """(name, dtype, shape, first byte)."""
    data: Any
    """numpy array of uint8; read-only where it comes out of the store."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Views of `data`."""
        memory = torch.frombuffer(memoryview(self.data), dtype=torch.uint8) if self.data.size else torch.empty(0)
        found = []
        for name, dtype, shape, start in self.entries:
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            found.append((name, memory[start : start + size].view(dtype).view(shape)))
        return found


def flatten(tensors: Sequence[tuple[str, Tensor]]) -> FlatTensors:
    """Copy them together, from whatever device they are on."""
    entries, end = [], 0
    for name, tensor in tensors:
        entries.append((name, tensor.dtype, tuple(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8)
    for (_, tensor), (_, dtype, shape, start) in zip(tensors, entries, strict=True):
        memory[start : start + tensor.nbytes].view(dtype).view(shape).copy_(tensor.detach())
    return FlatTensors(tuple(entries), memory.numpy())
