"""Positions of all numbers, the most likely off-by-one error: by hand and by invariance.

Two rows, prompt then response:      row 0: 11 12 | 21 22 23       row 1: 13 | 24
packed without each last token:      11 12 21 22   13              positions 0 1 2 3 4
read at the position of the token before:  r=0 at 12 (1), r=1 at 21 (2), r=2 at 22 (3); row 1: r=0 at 13 (4)
"""

from collections.abc import Sequence

import pytest
import torch

from ppoctl.core.batch.grid import pack
from ppoctl.core.batch.sequences import Sequences


def sequences(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, columns: int = 0) -> Sequences:
    rows, columns = len(prompts), max([columns, *map(len, responses)])
    tokens = torch.zeros(rows, columns, dtype=torch.int32)
    for row, response in enumerate(responses):
        tokens[row, : len(response)] = torch.tensor(response)
    return Sequences(
        prompt_tokens=torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        tokens=tokens,
        lengths=torch.tensor([len(response) for response in responses]),
    )


TWO_ROWS = sequences([[11, 12], [13]], [[21, 22, 23], [24]])


def test_pack_two_rows_matches_hand_computed_indices():
    packed = pack(TWO_ROWS, torch.tensor([0, 1]))
    assert packed.tokens.tolist() == [11, 12, 21, 22, 13]
    assert packed.seq_lengths == (4, 1)
    assert packed.read_at.tolist() == [1, 2, 3, 4]
    assert packed.targets.tolist() == [21, 22, 23, 24]
    assert packed.row.tolist() == [0, 0, 0, 1]
    assert packed.column.tolist() == [0, 1, 2, 0]
    assert TWO_ROWS.input_lengths.tolist() == [4, 1]
    grid = packed.to_grid(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert torch.equal(grid, torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.0, 0.0]]))


def test_rows_are_packed_in_requested_order():
    packed = pack(TWO_ROWS, torch.tensor([1, 0]))
    assert packed.tokens.tolist() == [13, 11, 12, 21, 22]
    assert packed.seq_lengths == (1, 4)
    assert packed.read_at.tolist() == [0, 2, 3, 4]
    assert packed.targets.tolist() == [24, 21, 22, 23]
    assert packed.row.tolist() == [0, 1, 1, 1]


def test_grid_of_selected_rows_equals_rows_of_full_grid():
    whole = pack(TWO_ROWS, torch.tensor([0, 1]))
    part = pack(TWO_ROWS, torch.tensor([1]))
    assert torch.equal(part.to_grid(part.targets.float()), whole.to_grid(whole.targets.float())[1:])


def test_targets_on_grid_equal_response_tokens():
    data = sequences([[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10, 11], [12, 13]])
    packed = pack(data, torch.arange(3))
    assert torch.equal(packed.to_grid(packed.targets.float()).long(), data.tokens)


def test_each_read_position_is_the_token_before_its_target():
    data = sequences([[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10, 11], [12, 13]])
    packed = pack(data, torch.arange(3))
    before = packed.tokens[packed.read_at]
    assert before.tolist() == [3, 4, 8, 9, 10, 6, 12]


def test_padding_columns_stay_zero_and_change_nothing_else():
    wide = sequences([[11, 12], [13]], [[21, 22, 23], [24]], columns=6)
    narrow, packed = pack(TWO_ROWS, torch.tensor([0, 1])), pack(wide, torch.tensor([0, 1]))
    for name in ("tokens", "read_at", "targets", "row", "column"):
        assert torch.equal(getattr(packed, name), getattr(narrow, name))
    grid = packed.to_grid(torch.ones(4))
    assert grid.shape == (2, 6)
    assert torch.equal(grid[:, :3], narrow.to_grid(torch.ones(4)))
    assert not bool(grid[:, 3:].any())


def test_gradients_flow_through_grid_to_tokens():
    packed = pack(TWO_ROWS, torch.tensor([0, 1]))
    values = torch.zeros(4, requires_grad=True)
    (packed.to_grid(values) * torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grid_keeps_dtype(dtype):
    assert pack(TWO_ROWS, torch.tensor([0, 1])).to_grid(torch.ones(4, dtype=dtype)).dtype == dtype
