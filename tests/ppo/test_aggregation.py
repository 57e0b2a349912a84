"""Aggregation of token losses into one number: by hand, and independent of the split into microbatches."""

from itertools import pairwise

import pytest
import torch
from grids import holey_mask, normal
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.formulas.aggregation import Aggregation, SequenceMean, SequenceSum, TokenMean, aggregation
from tolerance import FLOAT32

KINDS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length")

# Row 0 has three tokens with a hole in the middle, row 1 three, row 2 none, row 3 one.
LOSSES = torch.tensor([[6.0, 0.0, 1.0], [1.0, 2.0, 5.0], [0.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
MASK = torch.tensor([[True, False, True], [True, True, True], [False, False, False], [False, True, False]])


def loss_of(found: Aggregation, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return found.summed(losses, mask) / found.total(mask)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", (7 + 8 + 4) / 6),  # six unmasked tokens
        ("sequence_mean_token_mean", (7 / 2 + 8 / 3 + 4) / 3),  # two tokens, three and one; three sequences
        ("sequence_mean_token_sum", (7 + 8 + 4) / 3),
        ("fixed_length", (7 / 4 + 8 / 4 + 4 / 4) / 3),  # a response may have four tokens
    ],
)
def test_aggregation_of_three_sequences_by_hand(kind, expected):
    FLOAT32.check(loss_of(aggregation(kind, max_new_tokens=4), LOSSES, MASK), expected)


@pytest.mark.parametrize(("kind", "expected"), list(zip(KINDS, (6, 3, 3, 3), strict=True)))
def test_fully_masked_row_is_in_no_total(kind, expected):
    found = aggregation(kind, max_new_tokens=4)
    assert found.total(MASK) == found.total(MASK[[0, 1, 3]]) == expected
    assert found.total(MASK[2:3]) == 0
    assert float(found.summed(LOSSES[2:3], MASK[2:3])) == 0.0


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 6), max_size=4),
    empty=st.sets(st.integers(0, 5), max_size=5),
    padding=st.integers(0, 3),
)
def test_aggregation_is_independent_of_split_order_and_padding(kind, seed, cuts, empty, padding):
    mask = holey_mask(6, 5, seed=seed) & ~torch.tensor([row in empty for row in range(6)])[:, None]
    found, scores = aggregation(kind, max_new_tokens=5), normal(6, 5, seed=seed + 1).requires_grad_()
    losses = torch.where(mask, scores.square(), 0)
    [expected] = torch.autograd.grad(loss_of(found, losses, mask), scores, retain_graph=True)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    bounds = sorted({0, 6, *cuts})
    parts = [
        found.summed(*(torch.nn.functional.pad(grid[order[start:end]], (0, padding)) for grid in (losses, mask)))
        for start, end in pairwise(bounds)
    ]
    total = sum(parts) / found.total(mask)
    FLOAT32.check(total.detach(), loss_of(found, losses, mask).detach())
    FLOAT32.check(torch.autograd.grad(total, scores)[0], expected)


def test_sequence_sum_rejects_nonpositive_length():
    with pytest.raises(ValueError, match="length_tokens is 0"):
        SequenceSum(0)


def test_aggregation_name_selects_its_class():
    found = [aggregation(kind, max_new_tokens=7) for kind in KINDS]
    assert found == [TokenMean(), SequenceMean(), SequenceSum(1), SequenceSum(7)]
