"""A bucket: several tensors that are transferred together, their checksums, and the locations of their bytes.

Tensors are packed one after the other into one flat uint8 buffer, each at a multiple of `ALIGNMENT`. torch's own
pickling would copy every tensor on both sides.

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

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.convert.checksum import TensorChecksum, checksum_of

ALIGNMENT = 16
"""Alignment in bytes: each tensor in a flat buffer starts at a multiple of this number."""

Item = TypeVar("Item")
NamedTensors = Sequence[tuple[str, Tensor]]
"""Tensors in order, each with its Hugging Face name."""


@runtime_checkable
class BucketLocation(Protocol):
    """A location of the tensors of a bucket."""

    @property
    def lasts(self) -> bool:
        """Whether the tensors remain at the location until the next transfer, even if the trainer changes its
        weights."""
        ...

    def is_near(self) -> bool:
        """Whether this process can read the location."""
        ...

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors by name. The caller must not write to them."""
        ...


@dataclass(frozen=True)
class LocalTensors:
    """Tensors of this process, not copied."""

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
    """Name, dtype and shape of a tensor. A reader needs them to find the tensor in a flat buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class FlatTensors:
    """Tensors packed into host memory of this process."""

    specs: tuple[TensorSpec, ...]
    data: Any
    """numpy array of uint8. It is read-only if it comes from shared memory."""

    @property
    def lasts(self) -> bool:
        return True

    def is_near(self) -> bool:
        return True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return views of `data`."""
        with warnings.catch_warnings():
            # torch has no read-only tensors, and warns when the array is read-only.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            memory = torch.from_numpy(self.data)
        return views(memory, self.specs)


@dataclass(frozen=True)
class Bucket:
    """Some weights under their Hugging Face names: checksums, and the locations of the bytes."""

    checksums: Mapping[str, TensorChecksum]
    """Checksum of each tensor by the name of the tensor, computed from the trainer's tensor before any copy."""
    contents: tuple[BucketLocation, ...]
    """Locations of equal copies of the tensors. A reader uses the first location that it can read."""

    def lasting(self) -> "Bucket":
        """Return the bucket with only the locations that last until the next transfer."""
        return Bucket(self.checksums, tuple(content for content in self.contents if content.lasts))

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors from the first location that this process can read. Raises EnvironmentProblemError if
        this process can read no location."""
        for content in self.contents:
            if content.is_near():
                return content.tensors()
        raise EnvironmentProblemError(
            f"an engine cannot read any of the {len(self.contents)} copies of the new weights: they are on other "
            "machines",
            hint="`--set cluster.weights=store` sends them through Ray's object store instead",
        )


def bucket_of(tensors: NamedTensors, *contents: BucketLocation) -> Bucket:
    """Return a bucket of these tensors of this process. Their copies are at `contents`. Without `contents`, readers
    use the tensors themselves."""
    return Bucket({name: checksum_of(tensor) for name, tensor in tensors}, contents or (LocalTensors(tensors),))


def tensors_of(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of these buckets, one by one, from any location that this process can read."""
    for bucket in buckets:
        yield from bucket.tensors()


def in_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Split a stream of tensors into lists of at most `max_bytes`. A tensor that is larger gets a separate list."""
    return _split(tensors, lambda named: named[1].nbytes, max_bytes)


def planned_buckets(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Return how `in_buckets` will split tensors with these specs."""
    return list(_split(specs, lambda spec: spec.nbytes, max_bytes))


def _split(items: Iterable[Item], nbytes: Callable[[Item], int], max_bytes: int) -> Iterator[list[Item]]:
    bucket: list[Item] = []
    free_bytes = max_bytes
    for item in items:
        if bucket and nbytes(item) > free_bytes:
            yield bucket
            bucket, free_bytes = [], max_bytes
        bucket.append(item)
        free_bytes -= nbytes(item)
    if bucket:
        yield bucket


def flatten(tensors: NamedTensors) -> FlatTensors:
    """Copy tensors of any device into one buffer in host memory."""
    specs, memory = packed(tensors, torch.device("cpu"))
    return FlatTensors(specs, memory.numpy())


def packed(tensors: NamedTensors, device: torch.device) -> tuple[tuple[TensorSpec, ...], Tensor]:
    """Copy tensors into one new flat buffer on `device`. Returns their specs and the buffer (uint8)."""
    specs = specs_of(tensors)
    memory = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=device)
    pack(tensors, specs, memory)
    return specs, memory


def pack(tensors: NamedTensors, specs: Sequence[TensorSpec], memory: Tensor) -> None:
    """Copy tensors into the beginning of a flat buffer (uint8)."""
    for (_, target), (_, tensor) in zip(views(memory, specs), tensors, strict=True):
        target.copy_(tensor.detach())


def specs_of(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors, in order."""
    return tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors)


def packed_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the size in bytes of the flat buffer for tensors with these specs."""
    return sum(_aligned_bytes(spec) for spec in specs)


def views(memory: Tensor, specs: Iterable[TensorSpec]) -> list[tuple[str, Tensor]]:
    """Return the tensors in a flat buffer (uint8), as views of it."""
    tensors, start = [], 0
    for spec in specs:
        tensors.append((spec.name, memory[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)))
        start += _aligned_bytes(spec)
    return tensors


def _aligned_bytes(spec: TensorSpec) -> int:
    return -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
