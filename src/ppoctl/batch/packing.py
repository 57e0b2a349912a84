"""How rows are cut into microbatches. Cutting changes memory and speed, never a gradient."""

import torch
from jaxtyping import Int
from torch import Tensor

Rows = Int[Tensor, " m"]


def by_sequences(rows: Int[Tensor, " M"], microbatch_seqs: int) -> list[Rows]:
    """Consecutive runs of at most `microbatch_seqs` rows."""
    return list(torch.split(rows, microbatch_seqs))


def by_tokens(rows: Int[Tensor, " M"], seq_tokens: Int[Tensor, " M"], max_tokens: int) -> list[Rows]:
    """Bins of at most `max_tokens` packed tokens, longest rows first into the first bin with room (first-fit
    decreasing: at most 11/9 of the optimal number of bins). Rows keep their order inside a bin.

    `seq_tokens` are the packed tokens of each of `rows`. Raises ValueError when a single row exceeds the cap.
    """
    longest = int(seq_tokens.max())
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens exceeds the cap of {max_tokens}")
    bins: list[list[int]] = []
    room: list[int] = []
    tokens = seq_tokens.tolist()
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        target = next((b for b, free in enumerate(room) if free >= tokens[index]), None)
        if target is None:
            bins.append([])
            room.append(max_tokens)
            target = len(bins) - 1
        bins[target].append(index)
        room[target] -= tokens[index]
    return [rows[sorted(members)] for members in bins]
