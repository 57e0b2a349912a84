"""The token that gets the score of a sequence."""

import torch
from grids import holey_mask, normal

from ppoctl.ppo.rewards import terminal_rewards
from tolerance import EXACT


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
