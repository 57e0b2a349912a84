"""Context parallelism: the tokens of a microbatch split over ranks.

Every rank runs all layers on its own tokens; only attention needs the others', so there each rank gathers the keys
and values of all of them (Llama 3, arXiv:2407.21783, section 3.3.2). On the way back the gradients of a rank's keys
and values are added up over the ranks that read them.

Letters: C ranks, N packed tokens of all of them, S = N / C tokens of one. The N tokens are cut into 2C chunks and
rank c has the chunks c and 2C - 1 - c: late tokens of a sequence see many others and early ones few, so such a pair
costs about the same on every rank.

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
    """A run of this rank's tokens within one sequence, with the tokens they see, as places among the N."""

    queries: range
    keys: range
    """What `queries` see: the beginning of the sequence up to their last."""


@dataclass(frozen=True)
class ContextShare:
    """What a rank that has a part of a microbatch's tokens needs of the others."""

    group: torch.distributed.ProcessGroup
    keys_at: Int[Tensor, " K"]
    """Tokens that this rank's pieces see, piece by piece, as rows of what is gathered from the ranks."""
    read: Int[Tensor, " s"]
    """Which of the n positions read are this rank's."""
    num_read: int
    """n."""

    def seen(
        self, key: Float[Tensor, "S G D"], value: Float[Tensor, "S G D"]
    ) -> tuple[Float[Tensor, "K G D"], Float[Tensor, "K G D"]]:
        """Keys and values of the tokens that this rank's pieces see."""
        both = torch.cat([key, value], dim=1)  # one message instead of two
        gathered = gather_from_sequence_parallel_region(both, group=self.group)
        keys, values = gathered.index_select(0, self.keys_at).chunk(2, dim=1)
        return keys, values

    def of_all(self, outputs: Float[Tensor, " s"]) -> Float[Tensor, " n"]:
        """Outputs of all positions read, known to every rank. Each rank takes the same loss of them, and sends the
        gradient of its own outputs back."""
        own = outputs.new_zeros(self.num_read).index_copy(0, self.read, outputs)
        whole: Tensor = reduce_from_tensor_model_parallel_region(own, group=self.group)
        return whole


def places_of(rank: int, ranks: int, num_tokens: int) -> list[range]:
    """A rank's chunks of `num_tokens`, which are a multiple of 2 C."""
    size = num_tokens // (CHUNKS_PER_RANK * ranks)
    return [range(chunk * size, (chunk + 1) * size) for chunk in (rank, CHUNKS_PER_RANK * ranks - 1 - rank)]


def pieces_of(chunks: Sequence[range], seq_lengths: Sequence[int]) -> Iterator[Piece]:
    """The chunks cut where sequences begin, in the order of the chunks."""
    for chunk in chunks:
        start = 0
        for length in seq_lengths:
            first, end = max(chunk.start, start), min(chunk.stop, start + length)
            if first < end:
                yield Piece(range(first, end), range(start, end))
            start += length


def gathered_rows(ranks: int, num_tokens: int) -> Int[Tensor, " N"]:
    """Where each of the N tokens lies in what is gathered from the ranks, one rank after the other."""
    in_order = [place for rank in range(ranks) for chunk in places_of(rank, ranks, num_tokens) for place in chunk]
    return torch.argsort(torch.tensor(in_order))
