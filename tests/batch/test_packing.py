"""Cutting rows into microbatches: every row once, caps kept, nothing depends on chance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.batch.packing import by_sequences, by_tokens


def lists(groups: list[torch.Tensor]) -> list[list[int]]:
    return [group.tolist() for group in groups]


def test_runs_of_sequences_by_hand():
    assert lists(by_sequences(torch.tensor([5, 3, 8, 1, 9]), 2)) == [[5, 3], [8, 1], [9]]
    assert lists(by_sequences(torch.tensor([5, 3]), 4)) == [[5, 3]]


def test_bins_of_tokens_by_hand():
    """Cap 10, rows of 4, 7, 3, 6, 2 tokens. Longest first: 7 opens a bin (3 free), 6 another (4 free), 4 fills the
    second, 3 fills the first, 2 opens a third. Inside a bin rows keep their order."""
    rows = torch.tensor([10, 11, 12, 13, 14])
    assert lists(by_tokens(rows, torch.tensor([4, 7, 3, 6, 2]), 10)) == [[11, 12], [10, 13], [14]]


def test_a_row_of_exactly_the_cap_fits_and_one_more_token_does_not():
    assert lists(by_tokens(torch.tensor([7]), torch.tensor([10]), 10)) == [[7]]
    with pytest.raises(ValueError, match="a sequence of 11 tokens exceeds the cap of 10"):
        by_tokens(torch.tensor([7]), torch.tensor([11]), 10)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(30, 90))
def test_every_row_is_in_one_bin_within_the_cap_and_bins_are_few(tokens, cap):
    rows = torch.arange(len(tokens)) + 100
    bins = lists(by_tokens(rows, torch.tensor(tokens), cap))
    assert sorted(row for group in bins for row in group) == rows.tolist()
    fill = [sum(tokens[row - 100] for row in group) for group in bins]
    assert max(fill) <= cap
    assert all(group == sorted(group) for group in bins)
    # Any two bins together exceed the cap, or one would have taken the other's rows; so more than half is used.
    assert len(bins) == 1 or sum(fill) * 2 > cap * (len(bins) - 1)


@given(st.permutations(list(range(8))))
def test_bins_hold_the_same_lengths_in_whatever_order_rows_come(order):
    tokens = torch.tensor([3, 9, 4, 4, 7, 1, 6, 2])
    expected = sorted(sorted(tokens[group].tolist()) for group in by_tokens(torch.arange(8), tokens, 12))
    shuffled = by_tokens(torch.tensor(order), tokens[torch.tensor(order)], 12)
    assert sorted(sorted(tokens[group].tolist()) for group in shuffled) == expected
