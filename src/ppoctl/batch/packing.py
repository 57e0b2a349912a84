"""How rows are cut into microbatches. Cutting changes memory and speed, never a gradient.

Packed rows carry no padding, so every token that is computed is a real one; what a bad cut costs is microbatches.
Where parallel ranks meet inside a microbatch (experts) or pass microbatches along (pipeline stages), all ranks need
the same number of them: cut each rank's rows once, take the largest number over the ranks, and cut again with
`at_least` that many. Such ranks wait for each other, so bins are then made even instead of full.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from ppoctl.batch.balance import balance

Rows = Int[Tensor, " m"]


def by_sequences(rows: Int[Tensor, " M"], microbatch_seqs: int, *, at_least: int = 0) -> list[Rows]:
    """Consecutive runs of at most `microbatch_seqs` rows; no rows, no runs.

    With `at_least`, the larger of that and the number of runs otherwise, of equal length give or take one row.
    Raises ValueError when there are fewer rows than that.
    """
    if not at_least:
        return list(torch.split(rows, microbatch_seqs)) if len(rows) else []
    _require_rows(len(rows), at_least)
    return list(torch.tensor_split(rows, max(at_least, -(-len(rows) // microbatch_seqs))))


def by_tokens(
    rows: Int[Tensor, " M"], seq_tokens: Int[Tensor, " M"], max_tokens: int, *, at_least: int = 0
) -> list[Rows]:
    """Bins of at most `max_tokens` packed tokens, longest rows first into the first bin with room (first-fit
    decreasing: at most 11/9 of the optimal number of bins). Rows keep their order inside a bin; no rows, no bins.

    With `at_least`, the larger of that and the number of bins otherwise, balanced, most tokens first. Where balanced
    bins would break the cap, the full ones are kept and the fullest are halved until there are enough.

    `seq_tokens` are the packed tokens of each of `rows`. Raises ValueError when a single row exceeds the cap, or when
    there are fewer rows than `at_least`.
    """
    tokens: list[int] = seq_tokens.tolist()
    longest = max(tokens, default=0)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens exceeds the cap of {max_tokens}")
    bins = _first_fit(tokens, max_tokens)
    if at_least:
        _require_rows(len(tokens), at_least)
        bins = _evened(bins, tokens, max_tokens, max(at_least, len(bins)))
    return [rows[sorted(members)] for members in bins]


def _first_fit(tokens: list[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing. A tree of the room in each bin, a node the larger of its two below, finds the first bin
    in a few steps however many there are; a bin that is not open yet is one with all its room."""
    leaves = 1 << max(len(tokens) - 1, 0).bit_length()
    room = [max_tokens] * (2 * leaves)
    bins: list[list[int]] = [[] for _ in range(leaves)]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= tokens[index] else 2 * node + 1
        bins[node - leaves].append(index)
        room[node] -= tokens[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [members for members in bins if members]


def _evened(bins: list[list[int]], tokens: list[int], max_tokens: int, count: int) -> list[list[int]]:
    """`count` bins within the cap; `bins` are as many or fewer, and there are rows enough."""
    even = _balanced(range(len(tokens)), tokens, count)
    if max(_sum(members, tokens) for members in even) > max_tokens:
        even = _halved(bins, tokens, count)
    return sorted(even, key=lambda members: (-_sum(members, tokens), min(members)))


def _halved(bins: list[list[int]], tokens: list[int], count: int) -> list[list[int]]:
    """`count` bins, none fuller than the fullest of `bins`. Mostly they are as many already; that more than those can
    always be balanced within the cap is what trials say, and no proof."""
    halved = list(bins)
    while len(halved) < count:
        fullest = max((members for members in halved if len(members) > 1), key=lambda m: _sum(m, tokens))
        halved.remove(fullest)
        halved += _balanced(fullest, tokens, 2)
    return halved


def _balanced(members: Sequence[int], tokens: list[int], count: int) -> list[list[int]]:
    # A row counts at least one token, so that no bin stays empty.
    costs = torch.tensor([max(tokens[index], 1) for index in members], dtype=torch.float64)
    return [[members[place] for place in share.tolist()] for share in balance(costs, count)]


def _sum(members: Sequence[int], tokens: list[int]) -> int:
    return sum(tokens[index] for index in members)


def _require_rows(num_rows: int, at_least: int) -> None:
    if num_rows < at_least:
        raise ValueError(f"{num_rows} rows cannot make {at_least} microbatches")
