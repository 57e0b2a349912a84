"""One microbatch as the model sees it: packed tokens, where sequences end, and which positions are read.

Letters: N packed tokens of this rank, n positions it reads, D channels of a head. Where context ranks split the
tokens of a microbatch, a rank has pieces of its sequences; else they are whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ppoctl.batch.grid import Packed
from ppoctl.engines.megatron.context_parallel import ContextShare, Piece, gathered_rows, pieces_of, places_of
from ppoctl.engines.megatron.logprobs import ExcludedTokens, FrozenOutputs
from ppoctl.ports import OutputRequest


class RopeTables(NamedTuple):
    """Cosine and sine of each token's rotation angles, in the model's dtype."""

    cos: Float[Tensor, "N 1 half"]
    sin: Float[Tensor, "N 1 half"]


@dataclass(kw_only=True)
class PackedInput(PackedSeqParams):
    """Travels through Megatron-Core as its `packed_seq_params`, from the embedding to the output layer.

    Lengths are Python numbers, made once per microbatch: no layer asks the device for them.
    """

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64: place of each token in its own sequence."""
    query_lengths: tuple[int, ...]
    """Tokens of each piece; they add up to N."""
    key_lengths: tuple[int, ...]
    """Tokens that each piece sees: of its sequence those up to its last one."""
    read_at: Tensor
    """[n] packed positions whose output is wanted."""
    targets: Tensor
    """[n] ids those positions predict; not read by a critic."""
    asked: OutputRequest = field(default_factory=OutputRequest)
    """What the output layer is asked."""
    barred: ExcludedTokens | None = None
    """Ids that could not be drawn at some of those positions; None: none are asked to be left out."""
    reference: FrozenOutputs | None = None
    """What the reference's output layer reads at the same positions, where full KL is asked."""
    hidden_alone: bool = False
    """Ends before the output layer: the hidden states of the positions read are wanted, of this rank's tokens."""
    rope: RopeTables | None = None
    """Filled in by the model, once for all layers."""
    context: ContextShare | None = None
    """Where context ranks split the tokens: which are this rank's, and how it sees the others."""


@dataclass(frozen=True)
class ReadSettings:
    """Where a microbatch is read, and what the output layer is asked."""

    device: torch.device
    asked: OutputRequest = field(default_factory=OutputRequest)
    end_token_ids: tuple[int, ...] = ()
    """Ids that end a response, where they could not be drawn at the first `asked.min_new_tokens` of its positions."""
    token_multiple: int = 1
    """Packed tokens, of all context ranks, are a multiple of it: they and sequence parallelism split them evenly."""
    context: torch.distributed.ProcessGroup | None = None
    """The ranks that split them; None: one has them all."""


def packed_input(packed: Packed, reading: ReadSettings) -> PackedInput:
    """This rank's share of `packed` on the device, with the boundaries in the forms that attention kernels want.

    Tokens up to the multiple are a sequence of their own at the end, which nobody reads.
    """
    device, group = reading.device, reading.context
    filler = -len(packed.tokens) % reading.token_multiple
    lengths = (*packed.seq_lengths, filler) if filler else packed.seq_lengths
    total = sum(lengths)
    chunks = [range(total)] if group is None else places_of(group.rank(), group.size(), total)
    places = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
    pieces = list(pieces_of(chunks, lengths))
    read_at, read = _found_at(packed.read_at, places, total)
    query_lengths, key_lengths = (tuple(len(run) for run in runs) for runs in zip(*pieces, strict=True))
    share = None
    if group is not None:
        rows = _keys_at(pieces, gathered_rows(group.size(), total))
        share = ContextShare(group, rows.to(device), read.to(device), len(packed.read_at))
    return PackedInput(
        qkv_format="thd",
        cu_seqlens_q=_starts(query_lengths).to(device),
        cu_seqlens_kv=_starts(key_lengths).to(device),
        max_seqlen_q=max(query_lengths),
        max_seqlen_kv=max(key_lengths),
        tokens=F.pad(packed.tokens, (0, filler))[places].to(device),
        positions=torch.cat([torch.arange(length) for length in lengths])[places].to(device),
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        read_at=read_at.to(device),
        targets=packed.targets[read].to(device),
        asked=reading.asked,
        barred=_barred(packed, read, reading),
        context=share,
    )


def _barred(packed: Packed, read: Int[Tensor, " n"], reading: ReadSettings) -> ExcludedTokens | None:
    if not reading.end_token_ids:
        return None
    early = packed.column[read] < reading.asked.min_new_tokens
    return ExcludedTokens(early.to(reading.device), torch.tensor(reading.end_token_ids, device=reading.device))


def _found_at(
    wanted: Int[Tensor, " m"], places: Int[Tensor, " N"], total: int
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Wanted places that this rank has: where it has them, and which of the wanted they are."""
    own = torch.full((total,), -1)
    own[places] = torch.arange(len(places))
    found = own[wanted]
    which = torch.nonzero(found >= 0)[:, 0]
    return found[which], which


def _keys_at(pieces: Sequence[Piece], rows: Int[Tensor, " N"]) -> Int[Tensor, " K"]:
    return torch.cat([rows[piece.keys.start : piece.keys.stop] for piece in pieces])


def _starts(lengths: Sequence[int]) -> Int[Tensor, " s"]:
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
