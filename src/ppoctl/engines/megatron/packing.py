"""Split of rows into microbatches. The split affects memory and speed, but never a gradient.

Packed rows have no padding, so a bad split costs only additional microbatches. If parallel ranks communicate within a
microbatch (experts) or send microbatches to each other (pipeline stages), all ranks require the same number of
microbatches. The caller then splits each rank's rows once, takes the maximum number over the ranks, and splits again
with `at_least`. These ranks wait for each other, so their bins are balanced instead of filled.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from ppoctl.engines.megatron.balance import balance

Rows = Int[Tensor, " m"]


def by_sequences(rows: Int[Tensor, " M"], microbatch_seqs: int, *, at_least: int = 0) -> list[Rows]:
    """Return the rows in consecutive slices of at most `microbatch_seqs` rows; no slices if there are no rows.

    With `at_least`, return at least that many slices, whose lengths differ by at most one row. Raises ValueError if
    there are fewer rows than `at_least`.
    """
    if not at_least:
        return list(torch.split(rows, microbatch_seqs)) if len(rows) else []
    _require_rows(len(rows), at_least)
    return list(torch.tensor_split(rows, max(at_least, -(-len(rows) // microbatch_seqs))))


def by_tokens(
    rows: Int[Tensor, " M"], seq_tokens: Int[Tensor, " M"], max_tokens: int, *, at_least: int = 0
) -> list[Rows]:
    """Return bins of at most `max_tokens` packed tokens; no bins if there are no rows.

    The longest rows are placed first, each in the first bin with enough space (first-fit decreasing: at most 11/9 of
    the optimal number of bins). Rows keep their order within a bin.

    With `at_least`, return at least that many bins, balanced, largest first. If balanced bins would exceed
    `max_tokens`, return the filled bins, and halve the fullest bins until there are enough.

    `seq_tokens` has the number of packed tokens of each row in `rows`. Raises ValueError if a single row exceeds
    `max_tokens`, or if there are fewer rows than `at_least`.
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
    """Return the bins of first-fit decreasing.

    A binary tree contains the free capacity of each bin; an inner node is the larger of its two children. A search in
    the tree finds the first bin with enough space in a logarithmic number of steps. A bin that is not used yet has
    its full capacity.
    """
    leaves = 1 << max(len(tokens) - 1, 0).bit_length()
    capacity = [max_tokens] * (2 * leaves)
    bins: list[list[int]] = [[] for _ in range(leaves)]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        node = 1
        while node < leaves:
            node = 2 * node if capacity[2 * node] >= tokens[index] else 2 * node + 1
        bins[node - leaves].append(index)
        capacity[node] -= tokens[index]
        while node > 1:
            node //= 2
            capacity[node] = max(capacity[2 * node], capacity[2 * node + 1])
    return [members for members in bins if members]


def _evened(bins: list[list[int]], tokens: list[int], max_tokens: int, count: int) -> list[list[int]]:
    """Return `count` balanced bins of at most `max_tokens`. `bins` has at most `count` bins, and there are enough
    rows."""
    even = _balanced(range(len(tokens)), tokens, count)
    if max(_sum(members, tokens) for members in even) > max_tokens:
        even = _halved(bins, tokens, count)
    return sorted(even, key=lambda members: (-_sum(members, tokens), min(members)))


def _halved(bins: list[list[int]], tokens: list[int], count: int) -> list[list[int]]:
    """Return `count` bins, none fuller than the fullest of `bins`.

    Usually `bins` already has `count` bins. Only trials have shown that a larger number of bins can always be
    balanced within the maximum.
    """
    halved = list(bins)
    while len(halved) < count:
        fullest = max((members for members in halved if len(members) > 1), key=lambda m: _sum(m, tokens))
        halved.remove(fullest)
        halved += _balanced(fullest, tokens, 2)
    return halved


def _balanced(members: Sequence[int], tokens: list[int], count: int) -> list[list[int]]:
    # Each row costs at least 1, so that no bin stays empty.
    costs = torch.tensor([max(tokens[index], 1) for index in members], dtype=torch.float64)
    return [[members[index] for index in part.tolist()] for part in balance(costs, count)]


def _sum(members: Sequence[int], tokens: list[int]) -> int:
    return sum(tokens[index] for index in members)


def _require_rows(num_rows: int, at_least: int) -> None:
    if num_rows < at_least:
        raise ValueError(f"{num_rows} rows cannot make {at_least} microbatches")
