"""Memory that one process fills and others of its machine read: CUDA IPC on a GPU, a file without a name on a CPU.

    sender: Staging.put(tensors)  ->  Shared, a few bytes that go by any way  ->  readers: Shared.tensors()

Two pieces of memory take turns (`Staging`): one is read while the next is filled. What engines that die are restored
from stays (`Kept`): host memory for a whole transfer, which they read without asking the process that filled it. A
reader copies what it is given, since a loader may hold on to the tensors of half a layer until the other half has
come. On a CPU nothing has a name that could be left behind: the memory goes with the last process that has it open.
On a GPU torch keeps 80 KB of counters in /dev/shm beside it.
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

from ppoctl.errors import EnvironmentProblemError, OutOfMemoryError, SenderLostError
from ppoctl.machine.cuda_memory import fixed_segments
from ppoctl.weights.bucket import NamedTensors, TensorSpec, pack, packed_bytes, specs_of, views


@runtime_checkable
class Handle(Protocol):
    """How another process of the machine finds a piece of memory."""

    def copied(self, count: int) -> Tensor:
        """Copy of the first `count` bytes (uint8) in memory of this process, on the device they are on. Raises
        SenderLostError."""
        ...


@dataclass(frozen=True)
class Shared:
    """Content of a bucket in memory of the process that sends it; one that does not last is valid until that process
    has put two more."""

    specs: tuple[TensorSpec, ...]
    handle: Handle
    machine: str
    """`this_machine()` of the sender."""
    lasts: bool = False

    def is_near(self) -> bool:
        return self.machine == this_machine()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Copies in memory of this process. Raises SenderLostError where the sender is gone."""
        return views(self.handle.copied(packed_bytes(self.specs)), self.specs)


class SharedBuffers:
    """Two pieces of the sender's memory, filled in turn, each as large as the largest bucket that it has held."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[_Piece] = []

    def put(self, tensors: NamedTensors) -> Shared:
        """Copy tensors to where others can read them, over what was put before the last."""
        specs = specs_of(tensors)
        piece = self._pieces.pop(0) if len(self._pieces) == 2 else None
        if piece is None or piece.memory.nbytes < packed_bytes(specs):
            del piece  # before the larger one is there
            piece = _piece(packed_bytes(specs), self._device)
        pack(tensors, specs, piece.memory)
        self._pieces.append(piece)
        return Shared(specs, piece.handle(), this_machine())


class RetainedBuffers:
    """Host memory of the sender for all buckets of one transfer, filled anew by the next."""

    def __init__(self) -> None:
        self._file = _MemoryFile()
        self._mapped: list[tuple[int, Tensor]] = []
        """Parts of the file: where each begins, and its memory."""
        self._part = self._used = 0

    def begin(self) -> None:
        """Another transfer begins: nobody reads the last one's buckets any more."""
        self._part = self._used = 0

    def put(self, tensors: NamedTensors) -> Shared:
        """Copy tensors to where others can read them until the next transfer."""
        specs = specs_of(tensors)
        start, memory = self._room(packed_bytes(specs))
        pack(tensors, specs, memory)
        return Shared(specs, OpenFile(os.getpid(), self._file.descriptor, start), this_machine(), lasts=True)

    def _room(self, size: int) -> tuple[int, Tensor]:
        """So many bytes behind those of the bucket before: where in the file, and their memory."""
        while self._part < len(self._mapped) and self._used + size > len(self._mapped[self._part][1]):
            self._part, self._used = self._part + 1, 0
        if self._part == len(self._mapped):
            self._mapped.append((self._file.size, self._file.grown(max(size, _MAPPED_BYTES))))
        (start, memory), used = self._mapped[self._part], self._used
        self._used += size
        return start + used, memory[used : self._used]


_MAPPED_BYTES = 16 * 2**30
"""Addresses that `Kept` takes at a time, since each mapping is an open file; memory comes when it is written to."""


@cache
def this_machine() -> str:
    """Name of the boot and of the process numbers (a container has its own): equal in processes that find each other
    under /proc."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


class _Piece(Protocol):
    memory: Tensor

    def handle(self) -> Handle: ...


def _piece(size: int, device: torch.device) -> _Piece:
    return _OnGpu(size, device) if device.type == "cuda" else _OnHost(size)


class _MemoryFile:
    """A file in memory, without a name."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ppoctl-weights")
        self.size = 0

    def __del__(self) -> None:
        os.close(self.descriptor)

    def grown(self, size: int) -> Tensor:
        """At least so many bytes (uint8) more, at its end."""
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
    """Memory on the host: a file without a name that another process has open."""

    process: int
    descriptor: int
    start: int = 0
    """Bytes of the file before those that are meant."""

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
            # The process is gone, or what it has open under this number by now is something else.
            raise _lost(self.process) from error
        return torch.frombuffer(memory, dtype=torch.uint8)


class _OnGpu:
    """GPU memory of this process, which CUDA lets other processes open."""

    def __init__(self, size: int, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        with fixed_segments():
            self.memory = torch.empty(max(1, size), dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(self.memory)  # type: ignore[no-untyped-call]
        # torch counts readers of the memory, from one, and keeps it while the count is not 0: also for ever, where
        # several readers have counted below that, or the only one was killed. Who may read, and until when, is
        # agreed on by `Staging` and the driver instead: the count is 0 from now on, and readers find none.
        torch.UntypedStorage._release_ipc_counter_cuda(*arguments[_COUNTER])
        found = list(arguments)
        found[_COUNTER] = [b"/none", 0]
        found[_WAITS_FOR_EVENT] = False  # `handle` has waited
        self._arguments = tuple(found)

    def handle(self) -> Handle:
        # Another process may read as soon as it knows where.
        torch.cuda.current_stream(self.memory.device).synchronize()
        return OpenDevice(os.getpid(), self._arguments)


_DEVICE, _COUNTER, _WAITS_FOR_EVENT = 6, slice(11, 13), 14
"""Positions among the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True)
class OpenDevice:
    """GPU memory of another process, opened by CUDA IPC."""

    process: int
    arguments: tuple[Any, ...]
    """Arguments of torch's `rebuild_cuda_tensor`."""

    def copied(self, count: int) -> Tensor:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        # Each process counts devices for itself. Memory of another GPU of the machine can be opened from this one,
        # also where this process does not see that GPU.
        arguments = list(self.arguments)
        arguments[_DEVICE] = torch.cuda.current_device()
        try:
            theirs: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
            copy = theirs[:count].clone()
            torch.cuda.current_stream().synchronize()  # before the sender may fill it anew
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"an engine's GPU has no room for {count} bytes of new weights",
                hint="lower `cluster.weights_bucket_mib` or `generator.gpu_memory_frac`",
            ) from error
        except RuntimeError as error:
            if not Path(f"/proc/{self.process}").exists():
                raise _lost(self.process) from error
            raise _unreadable("GPU memory of the actor", error) from error
        return copy


def _lost(process: int) -> SenderLostError:
    return SenderLostError(
        f"weights were lost with process {process}, which sent them",
        hint="ppoctl resume RUN  # everything finished is committed",
    )


def _unreadable(what: str, error: Exception) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"an engine cannot read {what}, where new weights are: {str(error).splitlines()[0]}",
        hint="`--set cluster.weights=store` sends them over host memory instead: through Ray's object store in a job "
        "with Ray",
    )
