"""One microbatch as the model sees it: packed tokens, where sequences end, and which positions are read.

Letters: N packed tokens, n positions read, D channels of a head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ppoctl.batch.grid import Packed


class RopeTables(NamedTuple):
    """Cosine and sine of each token's rotation angles, in the model's dtype."""

    cos: Float[Tensor, "N 1 half"]
    sin: Float[Tensor, "N 1 half"]


@dataclass(kw_only=True)
class PackedInput(PackedSeqParams):
    """Travels through Megatron-Core as its `packed_seq_params`, from the embedding to the output layer.

    `seq_lengths` are Python numbers, made once per microbatch: no layer asks the device for them.
    """

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64: place of each token in its own sequence."""
    seq_lengths: tuple[int, ...]
    """Tokens of each sequence; they add up to N."""
    read_at: Tensor
    """[n] packed positions whose output is wanted."""
    targets: Tensor
    """[n] ids those positions predict; not read by a critic."""
    temperature: float = 1.0
    """Divides the logits."""
    with_entropy: bool = False
    """Also return the entropy of each distribution."""
    rope: RopeTables | None = None
    """Filled in by the model, once for all layers."""


@dataclass(frozen=True)
class Reading:
    """Where a microbatch is read, and what the output layer is asked."""

    device: torch.device
    temperature: float = 1.0
    with_entropy: bool = False
    token_multiple: int = 1
    """Packed tokens are a multiple of it: sequence parallelism splits them evenly."""


def packed_input(packed: Packed, reading: Reading) -> PackedInput:
    """`packed` on the device, with the boundaries in the forms that attention kernels want.

    Tokens up to the multiple are a sequence of their own at the end, which nobody reads.
    """
    device = reading.device
    filler = -len(packed.tokens) % reading.token_multiple
    lengths = (*packed.seq_lengths, filler) if filler else packed.seq_lengths
    starts: Int[Tensor, " s"] = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    on_device = starts.to(device)
    return PackedInput(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        tokens=F.pad(packed.tokens, (0, filler)).to(device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        seq_lengths=lengths,
        read_at=packed.read_at.to(device),
        targets=packed.targets.to(device),
        temperature=reading.temperature,
        with_entropy=reading.with_entropy,
    )
