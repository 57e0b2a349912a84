"""Page-locked host memory, which a GPU copies from and to at the full speed of its bus.

torch has its own (`pin_memory`), rounds it up to powers of two and keeps it for ever: a 7B model's parts take 1.1 to
1.9 times their bytes. Here memory is as large as what goes into it, and stays where it is until a larger piece is
asked for: locking takes about as long as copying.
"""

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppoctl.errors import OutOfMemoryError


class PinnedMemory:
    """So many bytes of host memory, locked for `device` where that is a GPU, as long as this object lives."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Raises OutOfMemoryError where the host has no such memory to lock."""
        self._cuda: Any = None
        try:
            self.bytes: Tensor = torch.frombuffer(
                mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
            )
        except OSError as error:
            raise _too_little(size, str(error)) from error
        if device.type == "cuda":
            self._lock(size, torch.cuda.cudart())

    def _lock(self, size: int, cuda: Any) -> None:
        found = cuda.cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0)
        if int(found) != 0:
            raise _too_little(size, f"CUDA error {int(found)} while locking it")
        self._cuda = cuda

    def __del__(self) -> None:
        if self._cuda is not None:
            self._cuda.cudaHostUnregister(self.bytes.data_ptr())


def _too_little(size: int, why: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"the host has no {size} bytes for what leaves a GPU: {why}",
        hint="ppoctl plan RECIPE  # what each node's host memory holds",
    )


_STAGED_BYTES = 64 * 2**20


class PinnedStaging:
    """The way of a GPU's tensors into ordinary host memory, through two locked pieces: the GPU fills one while the
    CPU empties the other."""

    def __init__(self, device: torch.device, size: int = _STAGED_BYTES) -> None:
        """Two pieces of `size` bytes."""
        self._device = device
        self._size = size
        self._pieces = [PinnedMemory(size, device) for _ in range(2)]

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy in host memory that is nobody else's."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        parts = zip(
            _bytes(tensor.detach().contiguous()).split(self._size), _bytes(copy).split(self._size), strict=True
        )
        before: Callable[[], object] | None = None
        for number, (part, target) in enumerate(parts):
            piece = self._pieces[number % 2].bytes[: len(part)]
            piece.copy_(part, non_blocking=True)
            emptied = partial(self._empty, piece, target, self._is_filled())
            if before is not None:
                before()
            before = emptied
        if before is not None:
            before()
        return copy

    def _is_filled(self) -> Callable[[], object]:
        """Waits for what the GPU was asked to do up to now."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    @staticmethod
    def _empty(piece: Tensor, target: Tensor, wait: Callable[[], object]) -> None:
        wait()
        target.copy_(piece)


def _bytes(tensor: Tensor) -> Tensor:
    # Not `view(-1)`: of a tensor of one number the stride may be anything.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
