"""Context parallelism: the tokens of a microbatch split over ranks.

Every rank runs all layers on its own tokens. Only attention needs the tokens of other ranks, so each rank gathers the
keys and values of all tokens before it computes attention (Llama 3, arXiv:2407.21783, section 3.3.2). In backward,
the gradients of a rank's keys and values are summed over the ranks that read them.

Letters: C ranks, N packed tokens in total, S = N / C tokens per rank. The N tokens are split into 2C chunks, and rank
c has the chunks c and 2C - 1 - c. Late tokens of a sequence see many other tokens and early tokens see few, so each
of these pairs of chunks costs about the same.

    chunks of 4 ranks:   0 1 2 3 4 5 6 7   ->   rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

CHUNKS_PER_RANK = 2


class Piece(NamedTuple):
    """Consecutive tokens of this rank within one sequence, and the tokens that they see, as indices into the N packed
    tokens."""

    queries: range
    keys: range
    """The tokens that `queries` see: the sequence up to the last query."""


@dataclass(frozen=True)
class ContextShare:
    """A context rank's slice of a microbatch's tokens, and how it exchanges tensors with the other ranks."""

    group: torch.distributed.ProcessGroup
    keys_at: Int[Tensor, " K"]
    """Tokens that this rank's pieces see, piece by piece, as row indices into the gathered tensor."""
    read: Int[Tensor, " s"]
    """Indices of the positions of this rank among the n positions to read."""
    num_read: int
    """n, the number of positions to read on all ranks."""

    def seen(
        self, key: Float[Tensor, "S G D"], value: Float[Tensor, "S G D"]
    ) -> tuple[Float[Tensor, "K G D"], Float[Tensor, "K G D"]]:
        """Return keys and values of the tokens that this rank's pieces see."""
        both = torch.cat([key, value], dim=1)  # one message instead of two
        gathered = gather_from_sequence_parallel_region(both, group=self.group)
        keys, values = gathered.index_select(0, self.keys_at).chunk(2, dim=1)
        return keys, values

    def of_all(self, outputs: Float[Tensor, " s"]) -> Float[Tensor, " n"]:
        """Return the outputs of all positions to read, on every rank. Each rank computes the same loss from these
        outputs. In backward, it passes on the gradient of its own outputs."""
        own = outputs.new_zeros(self.num_read).index_copy(0, self.read, outputs)
        total: Tensor = reduce_from_tensor_model_parallel_region(own, group=self.group)
        return total


def places_of(rank: int, ranks: int, num_tokens: int) -> list[range]:
    """Return a rank's chunks of the packed tokens. `num_tokens` must be a multiple of 2C."""
    size = num_tokens // (CHUNKS_PER_RANK * ranks)
    return [range(chunk * size, (chunk + 1) * size) for chunk in (rank, CHUNKS_PER_RANK * ranks - 1 - rank)]


def pieces_of(chunks: Sequence[range], seq_lengths: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces in the order of the chunks. A piece is a chunk, or a part of it: chunks are split where
    sequences begin."""
    for chunk in chunks:
        start = 0
        for length in seq_lengths:
            first, end = max(chunk.start, start), min(chunk.stop, start + length)
            if first < end:
                yield Piece(range(first, end), range(start, end))
            start += length


def gathered_rows(ranks: int, num_tokens: int) -> Int[Tensor, " N"]:
    """Return the row of each of the N tokens in the gathered tensor, which contains the tokens rank by rank."""
    in_order = [place for rank in range(ranks) for chunk in places_of(rank, ranks, num_tokens) for place in chunk]
    return torch.argsort(torch.tensor(in_order))
