"""A bucket: some tensors on their way, their checksums, and where their bytes can be read.

Tensors are packed one after the other into one flat piece of uint8, each at a multiple of `ALIGNMENT`, because
torch's own pickling would copy every tensor on both sides:

    specs:  [a: float32 (2, 4)] [b: bfloat16 (3,)] ...
    memory: |aaaaaaaaaaaaaaaaaa|bbb.............|...
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ppoctl.errors import EnvironmentProblemError
from ppoctl.weights.checksum import TensorChecksum, checksum_of

ALIGNMENT = 16
"""Bytes; each tensor of a flat piece starts at a multiple of it."""

Item = TypeVar("Item")
NamedTensors = Sequence[tuple[str, Tensor]]
"""Tensors in order, each with its Hugging Face name."""


@runtime_checkable
class BucketLocation(Protocol):
    """One place where the tensors of a bucket lie."""

    @property
    def lasts(self) -> bool:
        """Whether they lie there until the next transfer, whatever the trainer does meanwhile."""
        ...

    def is_near(self) -> bool:
        """Whether this process can read it."""
        ...

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors by name; nobody may write to them."""
        ...


@dataclass(frozen=True)
class LocalTensors:
    """Content in this process: the tensors themselves, not copied."""

    named: NamedTensors

    @property
    def lasts(self) -> bool:
        return False

    def is_near(self) -> bool:
        return True

    def tensors(self) -> list[tuple[str, Tensor]]:
        return list(self.named)


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor: what a reader must know to find it in a flat piece."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class FlatTensors:
    """Content packed into host memory of this process."""

    specs: tuple[TensorSpec, ...]
    data: Any
    """numpy array of uint8; read-only where it comes out of shared memory."""

    @property
    def lasts(self) -> bool:
        return True

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
    """Some weights under Hugging Face names: their checksums, and the places where they lie."""

    checksums: Mapping[str, TensorChecksum]
    """Checksum of each tensor by name, taken from the trainer's own before anything was copied."""
    contents: tuple[BucketLocation, ...]
    """Equal copies of the tensors; a reader takes the first that is near."""

    def lasting(self) -> "Bucket":
        """Bucket with the places that stay, without those that the trainer is about to need."""
        return Bucket(self.checksums, tuple(content for content in self.contents if content.lasts))

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors, from the first place that this process can read. Raises EnvironmentProblemError where it can
        read none."""
        for content in self.contents:
            if content.is_near():
                return content.tensors()
        raise EnvironmentProblemError(
            f"an engine is on another machine than each of the {len(self.contents)} places where new weights are",
            hint="`--set cluster.weights=store` sends them through Ray's object store instead",
        )


def bucket_of(tensors: NamedTensors, *contents: BucketLocation) -> Bucket:
    """Bucket of tensors of this process, which lie at `contents`; without any, they are read where they are."""
    return Bucket({name: checksum_of(tensor) for name, tensor in tensors}, contents or (LocalTensors(tensors),))


def tensors_of(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of these buckets, one by one, wherever they lie."""
    for bucket in buckets:
        yield from bucket.tensors()


def in_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut a stream of tensors into lists of at most `max_bytes`; a larger tensor is a list of its own."""
    return _cut(tensors, lambda named: named[1].nbytes, max_bytes)


def planned_buckets(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """How `in_buckets` will cut tensors like these."""
    return list(_cut(specs, lambda spec: spec.nbytes, max_bytes))


def _cut(items: Iterable[Item], nbytes: Callable[[Item], int], max_bytes: int) -> Iterator[list[Item]]:
    found: list[Item] = []
    room = max_bytes
    for item in items:
        if found and nbytes(item) > room:
            yield found
            found, room = [], max_bytes
        found.append(item)
        room -= nbytes(item)
    if found:
        yield found


def flatten(tensors: NamedTensors) -> FlatTensors:
    """Copy tensors of any device together into host memory."""
    specs, memory = packed(tensors, torch.device("cpu"))
    return FlatTensors(specs, memory.numpy())


def packed(tensors: NamedTensors, device: torch.device) -> tuple[tuple[TensorSpec, ...], Tensor]:
    """Copy tensors together into one new flat piece on `device`: their specs, and the piece (uint8)."""
    specs = specs_of(tensors)
    memory = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=device)
    pack(tensors, specs, memory)
    return specs, memory


def pack(tensors: NamedTensors, specs: Sequence[TensorSpec], memory: Tensor) -> None:
    """Copy tensors together into the beginning of a flat piece (uint8)."""
    for (_, place), (_, tensor) in zip(views(memory, specs), tensors, strict=True):
        place.copy_(tensor.detach())


def specs_of(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Specs of tensors, in order."""
    return tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors)


def packed_bytes(specs: Iterable[TensorSpec]) -> int:
    """Size in bytes of the flat piece that tensors like these fill."""
    return sum(_room(spec) for spec in specs)


def views(memory: Tensor, specs: Iterable[TensorSpec]) -> list[tuple[str, Tensor]]:
    """The tensors in a flat piece (uint8), as views of it."""
    found, start = [], 0
    for spec in specs:
        found.append((spec.name, memory[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)))
        start += _room(spec)
    return found


def _room(spec: TensorSpec) -> int:
    return -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
