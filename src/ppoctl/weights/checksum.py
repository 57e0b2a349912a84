"""Do trainer and engine hold the same weights? Checksums of tensors, equal on all devices, and their comparison.

Each tensor is checksummed as it leaves the trainer and again where the engine computes with it; `require_equal` wants
the two lists equal, name by name: nothing lost, nothing extra, nothing changed. (That both compute the same with them
is the canary's part.) It finds lost updates, mixed-up tensors and flipped bits; an adversary could pass it.

Numbers are compared bit by bit, except that -0.0 and denormals count as 0: reading back a packed matrix through its
own kernel loses the sign of a zero, and kernels may flush denormals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppoctl.errors import WeightSyncError

_WORDS_PER_ROUND = {"cpu": 2**15, "cuda": 2**24}
"""8-byte words mixed at a time: what stays in a core's cache on CPU, what keeps a GPU busy."""

# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


@dataclass(frozen=True)
class TensorChecksum:
    """Shape, dtype and a 64-bit checksum: equal for two tensors that hold the same numbers."""

    shape: tuple[int, ...]
    dtype: str
    value: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} checksum {self.value:#x}"


def checksum_of(tensor: Tensor) -> TensorChecksum:
    """Checksum of a tensor's numbers; -0.0 and denormals count as 0."""
    tensor = tensor.detach()
    tiny = torch.finfo(tensor.dtype).tiny
    numbers = torch.where(tensor.abs() < tiny, torch.zeros_like(tensor), tensor).contiguous()
    return TensorChecksum(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum_of_bytes(numbers))


@dataclass(frozen=True)
class LoadedWeight:
    """One weight as an engine holds it, under its Hugging Face name."""

    name: str
    checksum: TensorChecksum
    tied_to: str | None
    """Name of the weight that this one shares, which the trainer must have sent if it did not send `name` itself."""


class SentChecksums(dict[str, TensorChecksum]):
    """Checksums of what has left the trainer in one transfer, by name."""

    def add(self, checksums: Mapping[str, TensorChecksum]) -> None:
        """Raises WeightSyncError when a name comes twice."""
        for name, checksum in checksums.items():
            if name in self:
                raise _gap(name, "left the trainer twice")
            self[name] = checksum


def require_equal(announced: Sequence[str], sent: SentChecksums, loaded: Sequence[LoadedWeight]) -> None:
    """Raise WeightSyncError, naming the tensor, unless the engine has loaded exactly what the trainer announced."""
    places = {weight.name for weight in loaded}
    for name in announced:
        if name not in sent:
            raise _gap(name, f"was announced and never left the trainer ({len(sent)} of {len(announced)} did)")
        if name not in places:
            raise _gap(name, "was sent and has no place in the engine")
    names = set(announced)
    for name in sent:
        if name not in names:
            raise _gap(name, "was sent and is not among the announced names")
    for weight in loaded:
        _require_one_equal(weight, sent)


def _require_one_equal(weight: LoadedWeight, sent: Mapping[str, TensorChecksum]) -> None:
    source = weight.name if weight.name in sent else weight.tied_to
    if source is None or source not in sent:
        raise _gap(weight.name, f"is held by the engine ({weight.checksum}) and was not sent")
    if weight.checksum != sent[source]:
        via = "" if source == weight.name else f" with `{source}`, to which it is tied,"
        raise _gap(weight.name, f"was sent{via} as {sent[source]}, and the engine holds {weight.checksum}")


def _gap(name: str, what: str) -> WeightSyncError:
    return WeightSyncError(
        f"weight `{name}` {what}",
        hint="the generator would sample from other weights than the trainer's: resume the run, which loads them "
        "anew; if it fails again, report it with the model's config.json",
    )


def checksum_of_bytes(tensor: Tensor) -> int:
    """Signed 64-bit checksum of the bytes of `tensor` in logical order.

    Equal bytes give equal numbers whatever the strides, dtype or device. Each 8-byte word is mixed with its position
    by an invertible function and the results are added, so changing any bits of one word changes the number for
    certain, and any other change (an exchange of words too) with probability 1 - 2^-64.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if whole:
        total = _sum_of_mixed(_words(data[:whole]))
    tail = torch.zeros(16, dtype=torch.uint8, device=data.device)
    tail[: data.numel() - whole] = data[whole:]
    tail[8:].view(torch.int64).fill_(data.numel())
    return int(total + _sum_of_mixed(tail.view(torch.int64), first=whole // 8))


def _words(data: Tensor) -> Tensor:
    """Bytes seen as int64 words; copied first where a slice of a larger tensor does not start at a multiple of 8."""
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _sum_of_mixed(words: Tensor, first: int = 0) -> Tensor:
    """Scalar: the sum over words w at place i of mix(w + (i + 1) * STEP), all modulo 2^64."""
    size = _WORDS_PER_ROUND[words.device.type]
    ramp = torch.arange(first + 1, first + 1 + min(size, len(words)), device=words.device).mul_(_STEP)
    buffer, shifted = torch.empty_like(ramp), torch.empty_like(ramp)
    sums = []
    for number, round_words in enumerate(torch.split(words, size)):
        count = len(round_words)
        mixed, high = buffer[:count], shifted[:count]
        # Python's product has no limit; the tensor's arithmetic has 64 bits.
        offset = (number * size * _STEP + 2**63) % 2**64 - 2**63
        torch.add(round_words, ramp[:count], out=mixed).add_(offset)
        torch.bitwise_right_shift(mixed, 32, out=high).bitwise_and_(2**32 - 1)
        mixed.bitwise_xor_(high).mul_(_MIX)
        torch.bitwise_right_shift(mixed, 29, out=high).bitwise_and_(2**35 - 1)
        sums.append(mixed.bitwise_xor_(high).sum())
    return torch.stack(sums).sum()
