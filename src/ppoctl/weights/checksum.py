"""Do trainer and engine hold the same weights? Checksums of tensors, equal on all devices, and their comparison.

Each tensor is checksummed as it leaves the trainer and again where the engine computes with it; `require_equal` wants
the two lists equal, name by name: nothing lost, nothing extra, nothing changed. (That both compute the same with them
is the canary's part.) It finds lost updates, mixed-up tensors and flipped bits; an adversary could pass it.

Numbers are compared bit by bit, except that -0.0 and denormals count as 0: reading back a packed matrix through its
own kernel loses the sign of a zero, and kernels may flush denormals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppoctl.errors import WeightSyncError

_WORDS_PER_ROUND = {"cpu": 2**15, "cuda": 2**19}
"""8-byte words mixed at a time: what stays in a core's cache on a CPU; on a GPU 4 MiB, of which a handful
exist at a time, beside a model that fills the rest."""

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
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorChecksum(tuple(tensor.shape), dtype, _checksum(tensor.detach(), _without_tiny))


def _without_tiny(numbers: Tensor) -> Tensor:
    return numbers.masked_fill(numbers.abs() < torch.finfo(numbers.dtype).tiny, 0.0)


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
    return _checksum(tensor.detach(), lambda numbers: numbers)


def _checksum(tensor: Tensor, prepared: Callable[[Tensor], Tensor]) -> int:
    """Checksum of what `prepared` makes of the numbers, which it is given in rounds: memory does not grow with the
    tensor."""
    round_words = _WORDS_PER_ROUND[tensor.device.type]
    round_numbers = 8 * round_words // tensor.itemsize
    mixer = _Mixer(max(2, min(round_words, tensor.nbytes // 8)), tensor.device)
    end = torch.zeros(16, dtype=torch.uint8, device=tensor.device)
    for start in range(0, tensor.numel(), round_numbers):
        data = prepared(_flat(tensor, start, min(start + round_numbers, tensor.numel()))).view(torch.uint8)
        whole = data.numel() // 8 * 8
        if whole:
            mixer.add(_words(data[:whole]))
        end[: data.numel() - whole] = data[whole:]
    end[8:].view(torch.int64).fill_(tensor.nbytes)
    mixer.add(end.view(torch.int64))
    return int(mixer.total)


def _flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Numbers `start` to `stop` in logical order; of strided tensors only the rows that have them are copied."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = tensor[0].numel()
    first = start // row
    return tensor[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row]


def _words(data: Tensor) -> Tensor:
    """Bytes seen as int64 words; copied first where a slice of a larger tensor does not start at a multiple of 8."""
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


class _Mixer:
    """The sum over words w at place i of mix(w + (i + 1) * STEP), all modulo 2^64."""

    def __init__(self, most: int, device: torch.device) -> None:
        """For `most` words at a time."""
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self._ramp = torch.arange(1, 1 + most, device=device).mul_(_STEP)
        self._mixed, self._high = torch.empty_like(self._ramp), torch.empty_like(self._ramp)
        self._count = 0

    def add(self, words: Tensor) -> None:
        """Mix the words that follow."""
        count = len(words)
        mixed, high = self._mixed[:count], self._high[:count]
        # Python's product has no limit; the tensor's arithmetic has 64 bits.
        offset = (self._count * _STEP + 2**63) % 2**64 - 2**63
        torch.add(words, self._ramp[:count], out=mixed).add_(offset)
        torch.bitwise_right_shift(mixed, 32, out=high).bitwise_and_(2**32 - 1)
        mixed.bitwise_xor_(high).mul_(_MIX)
        torch.bitwise_right_shift(mixed, 29, out=high).bitwise_and_(2**35 - 1)
        self.total += mixed.bitwise_xor_(high).sum()
        self._count += count
