"""Pinned host memory: a GPU reads and writes it at the full speed of the bus.

torch's `pin_memory` rounds sizes up to powers of two and keeps the memory forever, so the parts of a 7B model take
1.1 to 1.9 times their bytes. Here a buffer is as large as its content. It is kept until a larger buffer is needed,
because pinning takes about as long as copying.
"""

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppoctl.core import units
from ppoctl.core.activity import ACTIVITIES
from ppoctl.core.errors import OutOfMemoryError


class PinnedMemory:
    """A buffer of host memory. If `device` is a GPU, the buffer is pinned for it as long as this object exists."""

    def __init__(self, size: int, device: torch.device, use: str = "offloaded GPU memory") -> None:
        """Allocate `size` bytes, which are 0. `use` names their use in errors. Raises OutOfMemoryError if the host
        cannot pin this much memory."""
        self._cuda: Any = None
        self._use = use
        try:
            self.bytes: Tensor = torch.frombuffer(
                mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
            )
        except OSError as error:
            raise self._too_little(size, str(error)) from error
        if device.type == "cuda":  # about half a second per GiB
            with ACTIVITIES.track(f"pinning {units.size(size)} of host memory for {use}"):
                self._pin(size, torch.cuda.cudart())

    def _pin(self, size: int, cuda: Any) -> None:
        status = cuda.cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0)
        if int(status) != 0:
            raise self._too_little(size, f"CUDA error {int(status)} while pinning")
        self._cuda = cuda

    def _too_little(self, size: int, why: str) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"the host cannot provide {size} bytes for {self._use}: {why}",
            hint="ppoctl plan RECIPE  # shows the host memory of each node",
        )

    def __del__(self) -> None:
        if self._cuda is not None:
            self._cuda.cudaHostUnregister(self.bytes.data_ptr())


def wait_for_submitted(device: torch.device) -> Callable[[], object]:
    """Return a function that waits for the work of this process that was submitted to the device until now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


_STAGED_BYTES = 64 * 2**20


class PinnedStaging:
    """Copying of GPU tensors to ordinary host memory through two pinned buffers. The GPU fills one buffer while the
    CPU empties the other."""

    def __init__(self, device: torch.device, size: int = _STAGED_BYTES) -> None:
        """Allocate two buffers of `size` bytes."""
        self._device = device
        self._size = size
        self._buffers = [PinnedMemory(size, device) for _ in range(2)]

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory that no other object uses."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        parts = zip(
            _bytes(tensor.detach().contiguous()).split(self._size), _bytes(copy).split(self._size), strict=True
        )
        empty_previous: Callable[[], object] | None = None
        for number, (part, target) in enumerate(parts):
            buffer = self._buffers[number % 2].bytes[: len(part)]
            buffer.copy_(part, non_blocking=True)
            empty_this = partial(self._empty, buffer, target, wait_for_submitted(self._device))
            if empty_previous is not None:
                empty_previous()
            empty_previous = empty_this
        if empty_previous is not None:
            empty_previous()
        return copy

    @staticmethod
    def _empty(buffer: Tensor, target: Tensor, wait: Callable[[], object]) -> None:
        wait()
        target.copy_(buffer)


def _bytes(tensor: Tensor) -> Tensor:
    # Not `view(-1)`: the stride of a tensor with one element is arbitrary.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
