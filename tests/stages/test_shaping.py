"""What training sees of a score: each step of the arithmetic, from hand-made rollouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ppoctl.batch.records import Carry
from ppoctl.stages.shaping import Earned, Scale, shape
from stages import hand


def earned(rewards: Any, **changes: Any) -> Earned:
    """Two responses, of two and three tokens."""
    keys = {"rollouts": hand.rollouts(), "valid": torch.tensor([True, True]), "carry": Carry()}
    return Earned(torch.tensor(rewards), **{**keys, **changes})


def test_a_reward_of_a_response_stands_at_its_last_counted_token() -> None:
    mask = torch.tensor([[True, True, False], [True, True, False]])
    rollouts = hand.rollouts(mask=mask, sampler_logprobs=hand.ACTOR * mask)
    found = earned([1.0, 2.0], rollouts=rollouts)
    assert found.per_token.tolist() == [[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]
    assert found.per_response.tolist() == [1.0, 2.0]


def test_rewards_of_tokens_stay_where_they_are_and_those_under_the_mask_count_nothing() -> None:
    found = earned([[0.5, 0.25, 9.0], [1.0, 0.0, -3.0]])
    assert found.per_token.tolist() == [[0.5, 0.25, 0.0], [1.0, 0.0, -3.0]]
    assert found.per_response.tolist() == [0.75, -2.0]


@pytest.mark.parametrize("rewards", [[5.0, 2.0], [[5.0, 5.0, 5.0], [0.0, 0.0, 2.0]]])
def test_what_has_no_score_earns_nothing(rewards: Any) -> None:
    found = earned(rewards, valid=torch.tensor([False, True]))
    assert found.per_response.tolist() == [0.0, 2.0]
    assert found.per_token.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]


def test_steps_are_taken_one_after_another_and_the_mean_is_of_rows_with_a_score() -> None:
    # 1 -> -1 + 2 = 1 -> 10; the other has no score.
    steps = (Scale((0.0, 1.0), (-1.0, 1.0)), Scale((-1.0, 1.0), (0.0, 10.0)))
    found = shape(hand.rewards(1.0, 0.0, outcomes=(0, 2)), hand.rollouts(), Carry(), steps)
    assert found.per_response.tolist() == [10.0, 0.0]
    assert found.figures == {"reward/shaped_mean": 10.0}


def test_token_scores_are_what_training_sees_where_the_scorer_gives_them() -> None:
    scores = torch.tensor([[0.5, 1.0, 0.0], [0.0, 0.25, 0.5]])
    found = shape(
        replace(hand.rewards(), token_scores=scores), hand.rollouts(), Carry(), (Scale((0.0, 1.0), (0.0, 2.0)),)
    )
    assert found.per_token.tolist() == [[1.0, 2.0, 0.0], [0.0, 0.5, 1.0]]
    assert found.figures == {"reward/shaped_mean": 2.25}
