"""Checksums of tensors, and their comparison: do trainer and engine hold the same weights? Checksums do not depend on
the device.

The checksum of each tensor is computed when the tensor leaves the trainer, and again from the memory with which the
engine computes. `require_equal` compares the two lists name by name: no tensor may be lost, added or changed. (The
canary checks that both sides compute the same function of the weights.) The comparison finds lost updates, mixed-up
tensors and flipped bits. It does not protect against an adversary.

Numbers are compared bit by bit, except that -0.0 and denormals count as 0: reading back a packed matrix through its
kernel loses the sign of a zero, and kernels may flush denormals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppoctl.core.errors import WeightSyncError

WORDS_PER_ROUND = {"cpu": 2**15, "cuda": 2**19}
"""Number of 8-byte words that are mixed at a time. On a CPU, the words fit into a core's cache. On a GPU, they take 4
MiB: a few buffers of this size must fit next to a model that fills the rest of the memory."""

# The odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


@dataclass(frozen=True)
class TensorChecksum:
    """Shape, dtype and 64-bit checksum of a tensor. They are equal for two tensors with the same numbers."""

    shape: tuple[int, ...]
    dtype: str
    value: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} checksum {self.value:#x}"


def checksum_of(tensor: Tensor, words_per_round: Mapping[str, int] = WORDS_PER_ROUND) -> TensorChecksum:
    """Return the checksum of a tensor's numbers; -0.0 and denormals count as 0."""
    dtype, round_words = str(tensor.dtype).removeprefix("torch."), words_per_round[tensor.device.type]
    return TensorChecksum(tuple(tensor.shape), dtype, _checksum(tensor.detach(), _without_tiny, round_words))


def _without_tiny(numbers: Tensor) -> Tensor:
    return numbers.masked_fill(numbers.abs() < torch.finfo(numbers.dtype).tiny, 0.0)


@dataclass(frozen=True)
class LoadedWeight:
    """One weight that the engine holds, under its Hugging Face name."""

    name: str
    checksum: TensorChecksum
    tied_to: str | None
    """Name of the weight that shares this weight's memory. None: no weight does. The trainer must have sent one of
    the two weights."""


class SentChecksums(dict[str, TensorChecksum]):
    """Checksums of all tensors that left the trainer in one transfer, by name."""

    def add(self, checksums: Mapping[str, TensorChecksum]) -> None:
        """Add checksums. Raises WeightSyncError if a name occurs twice."""
        for name, checksum in checksums.items():
            if name in self:
                raise _weight_error(name, "left the trainer twice")
            self[name] = checksum


def require_equal(announced: Sequence[str], sent: SentChecksums, loaded: Sequence[LoadedWeight]) -> None:
    """Raise WeightSyncError, which names a tensor that differs, unless the engine loaded exactly the tensors that the
    trainer announced."""
    loaded_names = {weight.name for weight in loaded}
    for name in announced:
        if name not in sent:
            raise _weight_error(name, f"was announced but never sent ({len(sent)} of {len(announced)} were)")
        if name not in loaded_names:
            raise _weight_error(name, "was sent, but the engine has no such weight")
    names = set(announced)
    for name in sent:
        if name not in names:
            raise _weight_error(name, "was sent but not announced")
    for weight in loaded:
        _require_one_equal(weight, sent)


def _require_one_equal(weight: LoadedWeight, sent: Mapping[str, TensorChecksum]) -> None:
    source = weight.name if weight.name in sent else weight.tied_to
    if source is None or source not in sent:
        raise _weight_error(weight.name, f"is held by the engine ({weight.checksum}) but was not sent")
    if weight.checksum != sent[source]:
        via = "" if source == weight.name else f" with `{source}`, to which it is tied,"
        raise _weight_error(weight.name, f"was sent{via} as {sent[source]}, but the engine holds {weight.checksum}")


def _weight_error(name: str, what: str) -> WeightSyncError:
    return WeightSyncError(
        f"weight `{name}` {what}",
        hint="the generator would sample from other weights than the trainer's: resume the run, which loads them "
        "again; if it fails again, report it with the model's config.json",
    )


def checksum_of_bytes(tensor: Tensor, words_per_round: Mapping[str, int] = WORDS_PER_ROUND) -> int:
    """Return a signed 64-bit checksum of the bytes of `tensor` in logical order.

    Equal bytes give equal numbers for any strides, dtype and device. Each 8-byte word is mixed with its position by
    an invertible function, and the results are added. A change of any bits within one word therefore always changes
    the number, and any other change (including an exchange of words) changes it with probability 1 - 2^-64.
    """
    return _checksum(tensor.detach(), lambda numbers: numbers, words_per_round[tensor.device.type])


def _checksum(tensor: Tensor, prepared: Callable[[Tensor], Tensor], round_words: int) -> int:
    """Return the checksum of the numbers that `prepared` returns for the tensor's numbers. The tensor is processed in
    parts, so that memory does not grow with the tensor."""
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
    """Return numbers `start` to `stop` in logical order. If the tensor is strided, copies only the rows that contain
    these numbers."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = tensor[0].numel()
    first = start // row
    return tensor[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row]


def _words(data: Tensor) -> Tensor:
    """Return a view of these bytes as int64 words. If the slice does not start at a multiple of 8 bytes, the view is
    of a copy."""
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


class _Mixer:
    """The sum over words w at position i of mix(w + (i + 1) * STEP), modulo 2^64."""

    def __init__(self, most: int, device: torch.device) -> None:
        """Allocate buffers for at most `most` words at a time."""
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self._ramp = torch.arange(1, 1 + most, device=device).mul_(_STEP)
        self._mixed, self._high = torch.empty_like(self._ramp), torch.empty_like(self._ramp)
        self._count = 0

    def add(self, words: Tensor) -> None:
        """Mix the next words."""
        count = len(words)
        mixed, high = self._mixed[:count], self._high[:count]
        # Python integers are unbounded, but the tensor computes modulo 2^64, so the offset must fit into 64 bits.
        offset = (self._count * _STEP + 2**63) % 2**64 - 2**63
        torch.add(words, self._ramp[:count], out=mixed).add_(offset)
        torch.bitwise_right_shift(mixed, 32, out=high).bitwise_and_(2**32 - 1)
        mixed.bitwise_xor_(high).mul_(_MIX)
        torch.bitwise_right_shift(mixed, 29, out=high).bitwise_and_(2**35 - 1)
        self.total += mixed.bitwise_xor_(high).sum()
        self._count += count
