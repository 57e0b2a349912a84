"""Memory that one process fills and other processes of its machine read: CUDA IPC on a GPU, an unnamed file on a CPU.

    sender: SharedBuffers.put(tensors)  ->  Shared, a few bytes that can be sent anyhow  ->  reader: Shared.tensors()

Two buffers alternate (`SharedBuffers`): one buffer is read while the other is filled. Engines that die are restored
from `RetainedBuffers`: host memory for a complete transfer, which engines read without calling the process that
filled it. A reader copies the bytes, since a loader may keep the tensors of half a layer until the other half has
arrived. On a CPU, no file has a name, so no file can be left over: the memory is freed when the last process that has
it open ends. On a GPU, torch also keeps 80 KB of counters in /dev/shm.
"""

import errno
import mmap
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ppoctl.core.errors import EnvironmentProblemError, OutOfMemoryError, SenderLostError
from ppoctl.core.machine.cuda_memory import fixed_segments
from ppoctl.engines.weights.bucket import NamedTensors, TensorSpec, pack, packed_bytes, specs_of, views


@runtime_checkable
class Handle(Protocol):
    """Address of a buffer for other processes of the machine."""

    def copied(self, count: int) -> Tensor:
        """Return a copy of the first `count` bytes (uint8) in memory of this process, on the same device as the
        buffer. Raises SenderLostError."""
        ...


@dataclass(frozen=True)
class Shared:
    """Tensors of a bucket in memory of the process that sends the bucket. Unless `lasts` is set, the tensors are
    valid until that process has put two more buckets."""

    specs: tuple[TensorSpec, ...]
    handle: Handle
    machine: str
    """`this_machine()` of the sender."""
    lasts: bool = False

    def is_near(self) -> bool:
        return self.machine == this_machine()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return copies in memory of this process. Raises SenderLostError if the sender has ended."""
        return views(self.handle.copied(packed_bytes(self.specs)), self.specs)


class SharedBuffers:
    """Two buffers of the sender, which are filled alternately. Each buffer is as large as the largest bucket that it
    has held."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []

    def put(self, tensors: NamedTensors) -> Shared:
        """Copy tensors to where other processes can read them. Overwrites the bucket before the previous one."""
        specs = specs_of(tensors)
        buffer = self._buffers.pop(0) if len(self._buffers) == 2 else None
        if buffer is None or buffer.memory.nbytes < packed_bytes(specs):
            del buffer  # free the buffer before the larger buffer is allocated: both may not fit
            buffer = _new_buffer(packed_bytes(specs), self._device)
        pack(tensors, specs, buffer.memory)
        self._buffers.append(buffer)
        return Shared(specs, buffer.handle(), this_machine())


class RetainedBuffers:
    """Host memory of the sender for all buckets of one part of the weights. The next transfer of this part overwrites
    it."""

    def __init__(self, mapped_bytes: int = 16 * 2**30) -> None:
        """`mapped_bytes` of address space are mapped at a time. The number is large because each mapping keeps a file
        open. Physical memory is used only when it is written."""
        self._mapped_bytes = mapped_bytes
        self._file = _MemoryFile()
        self._mapped: list[tuple[int, Tensor]] = []
        """Mappings of the file: the offset of each mapping in the file, and the memory of the mapping."""
        self._current = self._used = 0

    def begin(self) -> None:
        """Begin another transfer of the part. The caller guarantees that nothing reads the last buckets any more."""
        self._current = self._used = 0

    def put(self, tensors: NamedTensors) -> Shared:
        """Copy tensors to where other processes can read them until the part is sent again."""
        specs = specs_of(tensors)
        start, memory = self._reserve(packed_bytes(specs))
        pack(tensors, specs, memory)
        return Shared(specs, OpenFile(os.getpid(), self._file.descriptor, start), this_machine(), lasts=True)

    def _reserve(self, size: int) -> tuple[int, Tensor]:
        """Reserve `size` bytes after the previous bucket. Returns their offset in the file, and their memory."""
        while self._current < len(self._mapped) and self._used + size > len(self._mapped[self._current][1]):
            self._current, self._used = self._current + 1, 0
        if self._current == len(self._mapped):
            self._mapped.append((self._file.size, self._file.grown(max(size, self._mapped_bytes))))
        (start, memory), used = self._mapped[self._current], self._used
        self._used += size
        return start + used, memory[used : self._used]


@cache
def this_machine() -> str:
    """Return the boot id and the PID namespace (each container has its own). They are equal in processes that find
    each other under /proc."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


class _Buffer(Protocol):
    memory: Tensor

    def handle(self) -> Handle: ...


def _new_buffer(size: int, device: torch.device) -> _Buffer:
    return _OnGpu(size, device) if device.type == "cuda" else _OnHost(size)


class _MemoryFile:
    """An unnamed file in memory."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ppoctl-weights")
        self.size = 0

    def __del__(self) -> None:
        os.close(self.descriptor)

    def grown(self, size: int) -> Tensor:
        """Extend the file by at least `size` bytes, and return their memory (uint8)."""
        start = self.size
        self.size += -(-max(1, size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.descriptor, self.size)
        return torch.frombuffer(mmap.mmap(self.descriptor, self.size - start, offset=start), dtype=torch.uint8)


class _OnHost:
    """Host memory of this process."""

    def __init__(self, size: int) -> None:
        self._file = _MemoryFile()
        self.memory = self._file.grown(size)

    def handle(self) -> Handle:
        return OpenFile(os.getpid(), self._file.descriptor)


@dataclass(frozen=True)
class OpenFile:
    """Host memory: an unnamed file that another process has open."""

    process: int
    descriptor: int
    start: int = 0
    """Offset of the bytes in the file."""

    def copied(self, count: int) -> Tensor:
        try:
            with open(f"/proc/{self.process}/fd/{self.descriptor}", "rb") as file:  # noqa: PTH123 - reads at once
                memory = bytearray(max(1, count))
                file.seek(self.start)
                if file.readinto(memory) < count:
                    raise FileNotFoundError
        except OSError as error:
            if isinstance(error, PermissionError) or error.errno in (errno.EMFILE, errno.ENFILE):
                raise _unreadable(f"memory of process {self.process}", error) from error
            # The process has ended, or its file descriptor now refers to another file.
            raise _lost(self.process) from error
        return torch.frombuffer(memory, dtype=torch.uint8)


class _OnGpu:
    """GPU memory of this process, which other processes can open over CUDA IPC."""

    def __init__(self, size: int, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        with fixed_segments():
            self.memory = torch.empty(max(1, size), dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(self.memory)  # type: ignore[no-untyped-call]
        # torch counts the readers of the memory, beginning with one, and frees the memory only at zero. The count
        # never reaches zero if several readers each decrement it, or if the only reader was killed. `SharedBuffers`
        # and the driver already decide which process may read, and until when. The count is therefore released now,
        # and readers get no counter.
        torch.UntypedStorage._release_ipc_counter_cuda(*arguments[_COUNTER])
        shared_arguments = list(arguments)
        shared_arguments[_COUNTER] = [b"/none", 0]
        shared_arguments[_WAITS_FOR_EVENT] = False  # `handle` has waited
        self._arguments = tuple(shared_arguments)

    def handle(self) -> Handle:
        # Another process may read as soon as it has the handle, so the copy must be complete.
        torch.cuda.current_stream(self.memory.device).synchronize()
        return OpenDevice(os.getpid(), self._arguments)


_DEVICE, _COUNTER, _WAITS_FOR_EVENT = 6, slice(11, 13), 14
"""Positions in the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True)
class OpenDevice:
    """GPU memory of another process, opened over CUDA IPC."""

    process: int
    arguments: tuple[Any, ...]
    """Arguments of torch's `rebuild_cuda_tensor`."""

    def copied(self, count: int) -> Tensor:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        # Each process numbers devices for itself. This process can open memory of another GPU of the machine even if
        # this process cannot see that GPU.
        arguments = list(self.arguments)
        arguments[_DEVICE] = torch.cuda.current_device()
        try:
            theirs: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
            copy = theirs[:count].clone()
            torch.cuda.current_stream().synchronize()  # copied before the sender may overwrite it
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"an engine's GPU does not have {count} free bytes for new weights",
                hint="lower `cluster.weights_bucket_mib` or `generator.gpu_memory_frac`",
            ) from error
        except RuntimeError as error:
            if not Path(f"/proc/{self.process}").exists():
                raise _lost(self.process) from error
            raise _unreadable("GPU memory of the actor", error) from error
        return copy


def _lost(process: int) -> SenderLostError:
    return SenderLostError(
        f"weights were lost because process {process}, which sent them, has ended",
        hint="ppoctl resume RUN  # everything finished is committed",
    )


def _unreadable(what: str, error: Exception) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"an engine cannot read {what}, which holds the new weights: {str(error).splitlines()[0]}",
        hint="`--set cluster.weights=store` sends them over host memory instead: through Ray's object store if "
        "the job uses Ray",
    )
