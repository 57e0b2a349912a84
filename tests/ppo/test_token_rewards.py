"""The token that gets the score of a sequence, and rewards of tokens that are scaled."""

import torch
from grids import holey_mask, normal

from ppoctl.algorithms.formulas.rewards import terminal_rewards, with_unit_variance
from tolerance import EXACT, FLOAT32


def test_terminal_reward_is_at_last_unmasked_token():
    mask = torch.tensor([[True, True, False], [True, False, True], [True, False, False]])
    rewards = terminal_rewards(torch.tensor([2.0, -3.0, 0.5]), mask)
    EXACT.check(rewards, torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, -3.0], [0.5, 0.0, 0.0]]))


def test_fully_masked_row_gets_zero_rewards_despite_nan_score():
    mask = torch.tensor([[False, False], [True, True]])
    rewards = terminal_rewards(torch.tensor([float("nan"), 1.0]), mask)
    EXACT.check(rewards, torch.tensor([[0.0, 0.0], [0.0, 1.0]]))


def test_terminal_rewards_sum_to_score_without_padding():
    scores, mask = normal(8, seed=0), holey_mask(8, 11, seed=1)
    rewards = terminal_rewards(scores, mask)
    EXACT.check(rewards.sum(dim=1), scores)
    EXACT.check(rewards[~mask], torch.zeros(int((~mask).sum())))
    wider = terminal_rewards(scores, torch.nn.functional.pad(mask, (0, 3)))
    EXACT.check(wider, torch.nn.functional.pad(rewards, (0, 3)))


def test_rewards_with_unit_variance_by_hand():
    # Unmasked: 1, -2, 0.5, 4; mean 0.875, variance 18.1875 / 3 = 6.0625. TRL's masked_whiten(shift_mean=False) has
    # the same numbers.
    rewards = torch.tensor([[1.0, 50.0, -2.0], [0.5, 4.0, float("nan")]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    found = with_unit_variance(rewards, mask)
    FLOAT32.check(found, torch.tensor([[0.9257673, 0.0, -0.2926486], [0.7226981, 2.1441833, 0.0]]))
    FLOAT32.check(found[mask].mean(), 0.875)
    FLOAT32.check(found[mask].std(), 1.0)


def test_equal_rewards_keep_their_value():
    mask = holey_mask(4, 5, seed=2)
    FLOAT32.check(with_unit_variance(0.3 * mask, mask), 0.3 * mask)
