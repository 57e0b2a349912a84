"""Selected rows of records of one or several rounds, worked by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ppoctl.core.batch.records import Advantages, Logprobs, Rewards, Rollouts, Selection, Values
from ppoctl.core.batch.selection import every_row, take, within


def rollouts(number: int, prompts: list[list[int]], responses: list[list[int]], mask: list[list[int]]) -> Rollouts:
    """Return the rollouts of a round. Prompts, responses and masks are lists of unequal lengths."""
    width, count = max(map(len, responses)), len(responses)
    tokens, unmasked = torch.zeros(count, width, dtype=torch.int32), torch.zeros(count, width, dtype=torch.bool)
    for row, (ids, kept) in enumerate(zip(responses, mask, strict=True)):
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        unmasked[row, : len(ids)] = torch.tensor(kept, dtype=torch.bool)
    return Rollouts(
        prompt_tokens=torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        tokens=tokens,
        lengths=torch.tensor([len(ids) for ids in responses]),
        mask=unmasked,
        sampler_logprobs=tokens.where(unmasked, 0) * -0.5,
        finish=torch.tensor([row % 2 for row in range(count)]),
        seeds=torch.tensor([100 * number + row for row in range(count)]),
        prompt_ids=[f"p{number}{row}" for row in range(count)],
        sample_indices=list(range(count)),
        texts=[" ".join(map(str, ids)) for ids in responses],
        stamps=["actor@0:abc"] * count,
        sends=[1] * count,
    )


FIRST = rollouts(1, [[5], [6, 7]], [[1, 2], [3]], [[1, 1], [1]])
SECOND = rollouts(2, [[8, 9, 4], [3]], [[4, 5, 6], [7]], [[1, 0, 1], [1]])
"""The middle token of the first response is masked out: a hole."""


def selection(*places: tuple[int, int], **changes: Any) -> Selection:
    """Return the selection of these (round, row) pairs."""
    rounds, rows = (torch.tensor(column, dtype=torch.int64) for column in zip(*places, strict=True))
    ids = [f"p{number}{row}" for number, row in places]
    return Selection(rounds, rows, ids, [row for _, row in places], is_full=True, summary={}, **changes)


TWICE = selection((2, 0), (1, 1), (2, 0), (1, 0))
"""Rows of both rounds in another order, one of them twice."""


def test_taken_rollouts_have_the_selected_rows_in_order() -> None:
    taken = take(TWICE, [FIRST, SECOND])
    assert taken.prompt_tokens.tolist() == [8, 9, 4, 6, 7, 8, 9, 4, 5]
    assert taken.prompt_lengths.tolist() == [3, 2, 3, 1]
    assert taken.tokens.tolist() == [[4, 5, 6], [3, 0, 0], [4, 5, 6], [1, 2, 0]]
    assert taken.lengths.tolist() == [3, 1, 3, 2]
    assert taken.mask.int().tolist() == [[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0]]
    assert taken.sampler_logprobs.tolist() == [[-2, 0, -3], [-1.5, 0, 0], [-2, 0, -3], [-0.5, -1, 0]]
    assert taken.finish.tolist() == [0, 1, 0, 0]
    assert taken.seeds.tolist() == [200, 101, 200, 100]
    assert taken.prompt_ids == TWICE.prompt_ids == ["p20", "p11", "p20", "p10"]
    assert taken.sample_indices == [0, 1, 0, 0]
    assert taken.texts == ["4 5 6", "3", "4 5 6", "1 2"]
    assert [row.tolist() for row in taken.sequences.unpadded()] == [
        [8, 9, 4, 4, 5, 6],
        [6, 7, 3],
        [8, 9, 4, 4, 5, 6],
        [5, 1, 2],
    ]
    assert taken.episodes is None
    types = {name: getattr(FIRST, name).dtype for name in ("prompt_tokens", "tokens", "mask", "seeds", "finish")}
    assert {name: getattr(taken, name).dtype for name in types} == types


def test_taken_rollouts_have_the_episodes_of_their_rows() -> None:
    with_episodes = [
        replace(each, episodes=[{"end": f"{number}{row}"} for row in range(2)])
        for number, each in enumerate((FIRST, SECOND), start=1)
    ]
    assert take(TWICE, with_episodes).episodes == [{"end": end} for end in ("20", "11", "20", "10")]
    with pytest.raises(ValueError, match="episodes is present in all selected rounds or in none"):
        take(TWICE, [FIRST, with_episodes[1]])


def test_taken_rollouts_and_logprobs_have_the_experts_of_their_inputs() -> None:
    """Inputs are all tokens of a row but the last: 2 and 2 in the first round, 5 and 1 in the second."""
    one, two = (
        torch.tensor(rows, dtype=torch.uint8) for rows in ([[1], [2], [3], [4]], [[5], [6], [7], [8], [9], [0]])
    )
    expected = [[5], [6], [7], [8], [9], [3], [4], [5], [6], [7], [8], [9], [1], [2]]
    taken = take(TWICE, [replace(FIRST, experts=one), replace(SECOND, experts=two)])
    assert taken.experts is not None
    assert taken.experts.tolist() == expected
    assert taken.routed_sequences.experts.tolist() == expected
    logprobs = [
        Logprobs("actor@0:abc", {}, experts=experts, input_lengths=each.input_lengths)
        for experts, each in ((one, FIRST), (two, SECOND))
    ]
    of_logprobs = take(TWICE, logprobs)
    assert of_logprobs.experts is not None
    assert of_logprobs.experts.tolist() == expected


def test_taken_rewards_have_the_scores_of_their_samples() -> None:
    first = Rewards(torch.tensor([0.5, 0.0]), torch.tensor([0, 2]), {"words": [2.0, 0.0]}, ["", "boom"], ["x", None])
    second = Rewards(torch.tensor([1.0, 0.25]), torch.tensor([0, 0]), {"marks": [7.0, None]}, ["", ""], ["y", "z"])
    taken = take(TWICE, [first, second])
    assert taken.scores.tolist() == [1.0, 0.0, 1.0, 0.5]
    assert taken.valid.tolist() == [True, False, True, True]
    assert taken.extras == {"words": [None, 0.0, None, 2.0], "marks": [7.0, None, 7.0, None]}
    assert taken.outcome_messages == ["", "boom", "", ""]
    assert taken.truths == ["y", None, "y", "x"]


def test_width_is_that_of_the_selected_rounds_for_every_kind_of_record() -> None:
    narrow = selection((1, 1), (1, 0))
    grid = torch.tensor([[0.25, 0.25], [0.0, 0.0]])
    first = Rewards(torch.tensor([0.5, 0.0]), torch.tensor([0, 2]), {}, ["", "boom"], [None, None], grid)
    second = Rewards(torch.zeros(2), torch.tensor([2, 2]), {}, ["a", "b"], [None, None])
    taken = take(narrow, [first, second])
    assert taken.token_scores is not None
    assert taken.token_scores.tolist() == [[0.0, 0.0], [0.25, 0.25]]
    assert take(narrow, [FIRST, SECOND]).tokens.tolist() == [[3, 0], [1, 2]]


def test_token_scores_of_a_round_without_them_are_nan_where_a_row_has_a_score() -> None:
    first = Rewards(torch.tensor([0.5, 0.0]), torch.tensor([0, 2]), {}, ["", "boom"], [None, None])
    second = replace(first, token_scores=torch.tensor([[0.25, 0.0, 0.25], [0.0, 0.0, 0.0]]))
    taken = take(TWICE, [first, second])
    assert taken.token_scores is not None
    expected = [[0.25, 0.0, 0.25], [0.0, 0.0, 0.0], [0.25, 0.0, 0.25], [torch.nan, 0.0, 0.0]]
    torch.testing.assert_close(taken.token_scores, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_values_of_a_whole_record_are_those_of_the_first_selected_round() -> None:
    grids = [torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[4.0, 0.0, 6.0], [7.0, 0.0, 0.0]])]
    values = take(TWICE, [Values(grid, "critic@0:abc", grid.sum(1)) for grid in grids])
    assert values.values.tolist() == [[4, 0, 6], [3, 0, 0], [4, 0, 6], [1, 2, 0]]
    assert values.behind is not None
    assert values.behind.tolist() == [10, 3, 10, 3]
    assert values.stamp == "critic@0:abc"
    masks = [grid != 0 for grid in grids]
    both = [
        Advantages(
            advantages=grid,
            returns=grid,
            token_rewards=grid,
            mask=mask,
            carry_out={"kl_coef": 0.5 + at},
            summary={"advantage/raw_mean": 1.0},
        )
        for at, (grid, mask) in enumerate(zip(grids, masks, strict=True))
    ]
    taken = take(TWICE, both)
    assert taken.mask.int().tolist() == [[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0]]
    assert (taken.carry.kl_coef, taken.metrics()) == (0.5, {})


def test_record_without_fields_of_rows_is_taken_as_it_is() -> None:
    taken = take(TWICE, [Logprobs("actor@0:abc", {"gap_mean_abs": 0.5}), Logprobs("actor@0:abc", {})])
    assert taken == Logprobs("actor@0:abc", {"gap_mean_abs": 0.5})


def test_identity_of_a_taken_record_is_that_of_its_content() -> None:
    every = take(selection((1, 0), (1, 1)), [FIRST])
    assert every.identity == FIRST.identity
    assert take(selection((1, 1), (1, 0)), [FIRST]).identity != FIRST.identity


def test_empty_selection_takes_no_row() -> None:
    nothing = Selection(torch.zeros(0).long(), torch.zeros(0).long(), [], [], is_full=False, summary={})
    values = take(nothing, [Values(torch.ones(2, 3), "critic@0:abc")])
    assert values.values.shape == (0, 3)
    assert take(nothing, [FIRST, SECOND]).prompt_tokens.tolist() == []


@pytest.mark.parametrize("place", [(1, 2), (2, 2), (3, 0)])
def test_row_that_does_not_exist_is_refused(place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="record violates an invariant"):
        take(selection((1, 0), place), [FIRST, SECOND])


def test_selection_within_another_one_names_its_rows() -> None:
    """The rows of both rounds in another order: (2, 1) is row 0, (1, 0) row 1, (2, 0) row 2, (1, 1) row 3."""
    among = selection((2, 1), (1, 0), (2, 0), (1, 1))
    found = within(TWICE, among)
    assert (found.rounds.tolist(), found.rows.tolist()) == ([1, 1, 1, 1], [2, 3, 2, 1])
    assert (found.prompt_ids, found.sample_indices) == (TWICE.prompt_ids, TWICE.sample_indices)
    taken = take(found, [take(among, [FIRST, SECOND])])
    assert taken.identity == take(TWICE, [FIRST, SECOND]).identity
    with pytest.raises(ValueError, match="every selected sample is in the other selection"):
        within(TWICE, selection((2, 0), (1, 1)))


def test_every_row_selects_each_sample_once_in_order() -> None:
    every = every_row([FIRST, SECOND])
    assert (every.rounds.tolist(), every.rows.tolist()) == ([1, 1, 2, 2], [0, 1, 0, 1])
    assert every.prompt_ids == ["p10", "p11", "p20", "p21"]
