"""One microbatch as the model's input: packed tokens, ends of sequences, and positions to read.

Letters: N packed tokens of this rank, n positions that this rank reads, D channels of a head. If context ranks split
the tokens of a microbatch, a rank has pieces of sequences. Otherwise it has full sequences.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ppoctl.core.batch.grid import Packed
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.context_parallel import ContextShare, Piece, gathered_rows, pieces_of, places_of
from ppoctl.engines.megatron.logit_blocks import ExcludedTokens
from ppoctl.engines.megatron.output_logprobs import FrozenOutputs


class RopeTables(NamedTuple):
    """Cosine and sine of each token's rotation angles, in the model's dtype."""

    cos: Float[Tensor, "N 1 half"]
    sin: Float[Tensor, "N 1 half"]


class SequenceShares(NamedTuple):
    """The sequence of each token, for means over the sequences of a minibatch."""

    sequence: Int[Tensor, " N"]
    """Sequence of each token, among the S sequences of the microbatch. Padding is a separate sequence."""
    share: Float[Tensor, " S"]
    """Part of each sequence in a mean: 1 / the number of sequences of the minibatch; 0: padding."""


@dataclass(kw_only=True)
class PackedInput(PackedSeqParams):
    """A packed microbatch. Megatron-Core passes it from the embedding to the output layer as `packed_seq_params`.

    Lengths are Python numbers, computed once per microbatch, so that no layer has to read them from the device.
    """

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64: position of each token in its own sequence."""
    query_lengths: tuple[int, ...]
    """Number of tokens of each piece. The sum over the pieces is N."""
    key_lengths: tuple[int, ...]
    """Number of tokens that each piece sees: the tokens of its sequence up to the piece's last token."""
    read_at: Tensor
    """[n] indices of the packed tokens whose outputs are read."""
    targets: Tensor
    """[n] token ids that these positions predict. A critic does not use them."""
    request: OutputRequest = field(default_factory=OutputRequest)
    """Outputs requested from the output layer."""
    excluded: ExcludedTokens | None = None
    """Token ids that the sampler excluded at some of these positions. None: no id is excluded."""
    reference: FrozenOutputs | None = None
    """Inputs of the reference's output layer at the same positions, if full KL is requested."""
    hidden_alone: bool = False
    """Whether to stop before the output layer and return the hidden states of the positions to read, for this rank's
    tokens."""
    entering: Tensor | None = None
    """[N 1 hidden] hidden states after the frozen trunk, for a pass of the layers above it (`top.Top`)."""
    rope: RopeTables | None = None
    """Rotation of each token. The model computes it once for all layers."""
    window_rope: RopeTables | None = None
    """Rotation of each token in layers with a sliding window. In most models it is the same as `rope`."""
    context: ContextShare | None = None
    """If context ranks split the tokens: the tokens of this rank, and how it gets data of the other ranks."""
    at: Tensor
    """[N] index of each token among the input tokens of all sequences; -1: padding."""
    experts: Tensor | None = None
    """[N E] experts of each token (`Sequences.experts`); None: all routers choose."""
    chosen: dict[int, Tensor] | None = None
    """Layers of this rank with experts -> [N k] experts that the router chose, without gradient: the routers add
    them. None: they are not requested."""
    shares: SequenceShares | None = None
    """Sequences over which the routing is balanced. None: no rows of a minibatch, or no gradient is computed."""

    def replaced(self, **changes: Any) -> "PackedInput":
        """Return a copy with other values of these fields."""
        # `dataclasses.replace` passes Megatron-Core's fields to the constructor: None, where it annotates a tensor.
        copied = copy(self)
        for name, value in changes.items():
            setattr(copied, name, value)
        return copied

    def without_experts(self) -> "PackedInput":
        """Return a copy for which routers choose, do not report their choice, and are not balanced."""
        return self.replaced(experts=None, chosen=None, shares=None)


@dataclass(frozen=True)
class ReadSettings:
    """Device, token split and requested outputs of a microbatch."""

    device: torch.device
    request: OutputRequest = field(default_factory=OutputRequest)
    end_token_ids: tuple[int, ...] = ()
    """Ids that end a response, if the sampler excluded them at the first `request.min_new_tokens` positions of a
    response."""
    token_multiple: int = 1
    """The number of packed tokens over all context ranks is a multiple of this number, so that context and sequence
    parallelism split the tokens evenly."""
    context: torch.distributed.ProcessGroup | None = None
    """The ranks that split the tokens. None: one rank has all tokens."""


def packed_input(
    packed: Packed,
    reading: ReadSettings,
    experts: Int[Tensor, "A E"] | None = None,
    minibatch_seqs: int = 0,
) -> PackedInput:
    """Return this rank's slice of `packed` on the device, with sequence boundaries in the formats of the attention
    kernels. `experts` are those of the A input tokens of all sequences (`Sequences.experts`). `minibatch_seqs` is the
    number of sequences of the minibatch to which these belong; 0: they belong to none.

    Padding tokens up to `token_multiple` form a separate sequence at the end. The outputs of this sequence are not
    read.
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
    at = F.pad(packed.at, (0, filler), value=-1)[places]
    if experts is not None:
        experts = torch.where((at < 0)[:, None], -1, experts[at]).to(device)
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
        request=reading.request,
        excluded=_excluded(packed, read, reading),
        context=share,
        at=at.to(device),
        experts=experts,
        chosen={} if reading.request.experts else None,
        shares=_shares(lengths, places, device, minibatch_seqs, has_padding=filler > 0) if minibatch_seqs else None,
    )


def _shares(
    lengths: Sequence[int], places: Int[Tensor, " N"], device: torch.device, minibatch_seqs: int, *, has_padding: bool
) -> SequenceShares:
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[places]
    share = torch.full((len(lengths),), 1 / minibatch_seqs)
    if has_padding:
        share[-1] = 0.0
    return SequenceShares(sequence.to(device), share.to(device))


def _excluded(packed: Packed, read: Int[Tensor, " n"], reading: ReadSettings) -> ExcludedTokens | None:
    if not reading.end_token_ids:
        return None
    early = packed.column[read] < reading.request.min_new_tokens
    return ExcludedTokens(early.to(reading.device), torch.tensor(reading.end_token_ids, device=reading.device))


def _found_at(
    wanted: Int[Tensor, " m"], places: Int[Tensor, " N"], total: int
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Return the wanted positions that this rank has: their indices on this rank, and their indices in `wanted`."""
    index = torch.full((total,), -1)
    index[places] = torch.arange(len(places))
    on_rank = index[wanted]
    which = torch.nonzero(on_rank >= 0)[:, 0]
    return on_rank[which], which


def _keys_at(pieces: Sequence[Piece], rows: Int[Tensor, " N"]) -> Int[Tensor, " K"]:
    return torch.cat([rows[piece.keys.start : piece.keys.stop] for piece in pieces])


def _starts(lengths: Sequence[int]) -> Int[Tensor, " s"]:
    # The attention kernels require int32, and `cumsum` returns int64 by default.
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
