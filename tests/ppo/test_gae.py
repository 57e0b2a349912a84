"""Generalised advantage estimation without a loop, compared with hand-worked numbers of the paper and a float64 loop.

Verified here: the recursion, its holes, its doubling steps (rows on both sides of a power of two), a lambda for each
row, and its chunks of rows. Not verified here: speed (benchmarks/gae.py), and results on a GPU.
"""

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned

from ppoctl.algorithms.formulas.generalized_advantages import CHUNK_TOKENS, gae, length_adaptive_lambda
from tolerance import EXACT, FLOAT32

SETTINGS = [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.5), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.99, 1.0)]


def reference(rewards, values, mask, gamma, lam):
    """Compute the recursion of the paper in float64, token by token from right to left."""
    rewards, values = rewards.double(), values.double()
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros(rewards.shape[0], dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        counts = mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(counts, advantage, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = torch.where(counts, advantage, 0)
        returns[:, t] = torch.where(counts, advantage + values[:, t], 0)
    return advantages, returns


def example(num_rows, num_columns, *, seed=0):
    mask = holey_mask(num_rows, num_columns, seed=seed + 2)
    mask[-1] = True  # one row without a hole, up to the last column
    return normal(num_rows, num_columns, seed=seed), normal(num_rows, num_columns, seed=seed + 1), mask


def test_gae_skips_tool_tokens_by_paper() -> None:
    """Schulman et al. 2016 (arXiv:1506.02438), eq. 16: A_t = sum_l (gamma lambda)^l delta_t+l, with delta_t = r_t +
    gamma V_t+1 - V_t. Tokens 1 and 2 are tool output: t counts tokens 0, 3 and 4 only."""
    # gamma 0.8, lambda 0.5, so gamma lambda = 0.4. Values 2, 1, 5; rewards 0.5, 0, 3.
    # delta: 0.5 + 0.8 x 1 - 2 = -0.7;   0 + 0.8 x 5 - 1 = 3;   3 - 5 = -2.
    # A: -0.7 + 0.4 x 3 + 0.16 x -2 = 0.18;   3 + 0.4 x -2 = 2.2;   -2.
    rewards = torch.tensor([[0.5, -77.0, -77.0, 0.0, 3.0]])
    values = torch.tensor([[2.0, -77.0, -77.0, 1.0, 5.0]])
    mask = torch.tensor([[True, False, False, True, True]])
    advantages, returns = gae(rewards, values, mask, gamma=0.8, lam=0.5)
    FLOAT32.check(advantages, torch.tensor([[0.18, 0.0, 0.0, 2.2, -2.0]]))
    FLOAT32.check(returns, torch.tensor([[2.18, 0.0, 0.0, 3.2, 3.0]]))


@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
@pytest.mark.parametrize("num_columns", [1, 2, 3, 6, 7, 14, 15, 197, pytest.param(4103, marks=pytest.mark.ci("197"))])
def test_gae_equals_float64_loop(gamma, lam, num_columns):
    rewards, values, mask = example(3, num_columns)
    found = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for got, expected in zip(found, reference(rewards, values, mask, gamma, lam), strict=True):
        FLOAT32.check(got, expected)
        assert got.dtype == torch.float32


@pytest.mark.parametrize("lam", [0.95, torch.tensor([0.0, 0.5, 0.9, 0.99, 1.0])], ids=["one", "each row its own"])
def test_gae_rows_beyond_one_chunk_equal_single_rows(lam):
    rewards, values, mask = example(5, CHUNK_TOKENS // 2)  # two rows at a time, and one left over
    found = gae(rewards, values, mask, gamma=0.99, lam=lam)
    for row, its in enumerate(torch.as_tensor(lam).expand(5).tolist()):
        alone = gae(*(x[row : row + 1] for x in (rewards, values, mask)), gamma=0.99, lam=its)
        for got, expected in zip(found, alone, strict=True):
            FLOAT32.check(got[row : row + 1], expected)


def test_gae_passes_terminal_reward_to_first_of_10000_tokens():
    # gamma lam = 1 over 10000 tokens: the sums must not drift.
    rewards, values = torch.zeros(1, 10_000), torch.full((1, 10_000), 0.25)
    rewards[0, -1] = 1.0
    advantages, returns = gae(rewards, values, torch.ones(1, 10_000, dtype=torch.bool), gamma=1.0, lam=1.0)
    EXACT.check(returns, torch.ones(1, 10_000))
    EXACT.check(advantages, torch.full((1, 10_000), 0.75))


@pytest.mark.parametrize(
    "lam", [0.95, 0.999, 0.99999, 1.0, length_adaptive_lambda(torch.ones(1, 16_384).bool(), alpha=9.0)]
)
def test_values_that_predict_the_reward_of_16384_tokens_have_advantage_zero(lam):
    # Each delta_t is 3 - 3 = 0, so every advantage is 0 and every return is 3, for each lambda.
    rewards, values = torch.zeros(1, 16_384), torch.full((1, 16_384), 3.0)
    rewards[0, -1] = 3.0
    advantages, returns = gae(rewards, values, torch.ones(1, 16_384, dtype=torch.bool), gamma=1.0, lam=lam)
    FLOAT32.check(advantages, torch.zeros(1, 16_384))
    FLOAT32.check(returns, values)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_gae_ignores_masked_garbage(garbage):
    rewards, values, mask = example(4, 128)
    clean = gae(poisoned(rewards, mask, 0.0), poisoned(values, mask, 0.0), mask, gamma=0.99, lam=0.95)
    dirty = gae(poisoned(rewards, mask, garbage), poisoned(values, mask, garbage), mask, gamma=0.99, lam=0.95)
    for got, expected in zip(dirty, clean, strict=True):
        EXACT.check(got, expected)
        EXACT.check(got[~mask], torch.zeros(int((~mask).sum())))


def test_gae_of_fully_masked_row_is_zero_and_empty_grid_is_empty():
    advantages, returns = gae(torch.ones(1, 4), torch.ones(1, 4), torch.zeros(1, 4).bool(), gamma=1.0, lam=1.0)
    EXACT.check(advantages, torch.zeros(1, 4))
    EXACT.check(returns, torch.zeros(1, 4))
    for shape in ((0, 4), (2, 0)):
        empty = torch.zeros(shape)
        assert gae(empty, empty, empty.bool(), gamma=1.0, lam=1.0)[0].shape == shape


def test_gae_results_require_no_gradient():
    rewards, values, mask = example(2, 5)
    advantages, returns = gae(rewards.requires_grad_(), values.requires_grad_(), mask, gamma=1.0, lam=0.95)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_gae_ignores_autocast():
    rewards, values, mask = example(2, 192)
    expected = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    EXACT.check(found[0], expected[0])


@pytest.mark.parametrize(
    ("gamma", "lam", "name"), [(1.1, 1.0, "gamma"), (1.0, -0.1, "lam"), (float("nan"), 1.0, "gamma")]
)
def test_gae_rejects_discount_outside_0_to_1(gamma, lam, name):
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=f"{name} is"):
        gae(one, one, one.bool(), gamma=gamma, lam=lam)


def test_gae_checks_lambda_of_every_row():
    grid = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"lam is 1\.5"):
        gae(grid, grid, grid.bool(), gamma=1.0, lam=torch.tensor([1.0, 1.5]))
