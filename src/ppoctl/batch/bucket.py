"""Weights on their way from a trainer to engines, some tensors at a time.

A `Bucket` says what it holds, and what that was when it left. Its content is where a reader can get at it: tensors
in the process that made them; one flat piece of memory once it leaves that process, which can lie where others read
it. (torch's own pickling would copy each tensor on both sides.)
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ppoctl.batch.checksum import Print, fingerprint
from ppoctl.errors import EnvironmentProblemError

ALIGNMENT = 16
"""Bytes; each tensor of a flat piece starts at a multiple of it."""


@runtime_checkable
class Content(Protocol):
    """Named tensors, somewhere."""

    def is_near(self) -> bool:
        """Whether this process can read it."""
        ...

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Not to be written to."""
        ...


@dataclass(frozen=True)
class Here:
    """Tensors of this process, as they are."""

    named: Sequence[tuple[str, Tensor]]

    def is_near(self) -> bool:
        return True

    def tensors(self) -> list[tuple[str, Tensor]]:
        return list(self.named)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class FlatTensors:
    """Tensors one after the other in `data`, each at the next multiple of `ALIGNMENT`."""

    specs: tuple[TensorSpec, ...]
    data: Any
    """numpy array of uint8; read-only where it comes out of shared memory."""

    def is_near(self) -> bool:
        return True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Views of `data`."""
        with warnings.catch_warnings():
            # torch has no read-only tensors, and says so.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            memory = torch.from_numpy(self.data)
        return views(memory, self.specs)


@dataclass(frozen=True)
class Bucket:
    """So many weights, under Hugging Face names."""

    prints: Mapping[str, Print]
    """Of each tensor, taken from the one the trainer has."""
    contents: tuple[Content, ...]
    """The same, in each of these places."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """From the first place that this process can read. Raises EnvironmentProblemError where it can read none."""
        for content in self.contents:
            if content.is_near():
                return content.tensors()
        raise EnvironmentProblemError(
            f"an engine is on another machine than each of the {len(self.contents)} places where new weights are",
            hint="`--set cluster.weights=store` sends them through Ray's object store instead",
        )


def bucket_of(tensors: Sequence[tuple[str, Tensor]], *contents: Content) -> Bucket:
    """Of tensors of this process; read where they are unless they also lie somewhere else."""
    return Bucket({name: fingerprint(tensor) for name, tensor in tensors}, contents or (Here(tensors),))


def tensors_of(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """One by one, wherever they are."""
    for bucket in buckets:
        yield from bucket.tensors()


def in_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """As many at a time as fit, or one that does not."""
    found: list[tuple[str, Tensor]] = []
    room = max_bytes
    for name, tensor in tensors:
        if found and tensor.nbytes > room:
            yield found
            found, room = [], max_bytes
        found.append((name, tensor))
        room -= tensor.nbytes
    if found:
        yield found


def flatten(tensors: Sequence[tuple[str, Tensor]]) -> FlatTensors:
    """Copy them together into host memory, from whatever device they are on."""
    specs, memory = packed(tensors, torch.device("cpu"))
    return FlatTensors(specs, memory.numpy())


def packed(tensors: Sequence[tuple[str, Tensor]], device: torch.device) -> tuple[tuple[TensorSpec, ...], Tensor]:
    """Copy them together into one piece of uint8 on a device."""
    specs = specs_of(tensors)
    memory = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=device)
    pack(tensors, specs, memory)
    return specs, memory


def pack(tensors: Sequence[tuple[str, Tensor]], specs: Sequence[TensorSpec], memory: Tensor) -> None:
    """Copy them together into the beginning of this piece."""
    for (_, place), (_, tensor) in zip(views(memory, specs), tensors, strict=True):
        place.copy_(tensor.detach())


def specs_of(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """What describes them, in order."""
    return tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors)


def packed_bytes(specs: Iterable[TensorSpec]) -> int:
    """Of the piece they make together."""
    return sum(_room(spec) for spec in specs)


def views(memory: Tensor, specs: Iterable[TensorSpec]) -> list[tuple[str, Tensor]]:
    """The tensors in such a piece."""
    found, start = [], 0
    for spec in specs:
        found.append((spec.name, memory[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)))
        start += _room(spec)
    return found


def _room(spec: TensorSpec) -> int:
    return -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
