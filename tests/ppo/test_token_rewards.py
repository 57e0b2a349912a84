"""Where the score of a sequence lands."""

import torch
from grids import holey_mask, normal

from ppoctl.ppo.rewards import terminal_rewards
from tolerance import EXACT


def test_the_score_lands_on_the_last_counted_token_of_its_row():
    mask = torch.tensor([[True, True, False], [True, False, True], [True, False, False]])
    rewards = terminal_rewards(torch.tensor([2.0, -3.0, 0.5]), mask)
    EXACT.check(rewards, torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, -3.0], [0.5, 0.0, 0.0]]))


def test_a_row_without_a_counted_token_gets_zeros_even_for_a_nan_score():
    mask = torch.tensor([[False, False], [True, True]])
    rewards = terminal_rewards(torch.tensor([float("nan"), 1.0]), mask)
    EXACT.check(rewards, torch.tensor([[0.0, 0.0], [0.0, 1.0]]))


def test_every_row_adds_up_to_its_score_and_padding_columns_get_nothing():
    scores, mask = normal(8, seed=0), holey_mask(8, 11, seed=1)
    rewards = terminal_rewards(scores, mask)
    EXACT.check(rewards.sum(dim=1), scores)
    EXACT.check(rewards[~mask], torch.zeros(int((~mask).sum())))
    wider = terminal_rewards(scores, torch.nn.functional.pad(mask, (0, 3)))
    EXACT.check(wider, torch.nn.functional.pad(rewards, (0, 3)))
