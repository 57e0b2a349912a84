"""A cheap checksum of a tensor, equal on every device: do trainer and engine hold the same weights?

It finds lost updates, mixed-up tensors and flipped bits. It is not cryptographic: an adversary could pass it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Checksum of a tensor's numbers. -0.0 and denormals count as 0, which an engine's packed weights lose when they
    are read back (`weights.proof`)."""
    tensor = tensor.detach()
    tiny = torch.finfo(tensor.dtype).tiny
    numbers = torch.where(tensor.abs() < tiny, torch.zeros_like(tensor), tensor).contiguous()
    return TensorChecksum(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum_of_bytes(numbers))


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
