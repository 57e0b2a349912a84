"""Weights and sampled rows of PF-PPO: by hand, and equal to those of verl."""

from functools import partial

import pytest
import torch

from ppoctl.algorithms.formulas.resampling import (
    effective_rows,
    max_min_weights,
    max_random_weights,
    or_uniform,
    power_weights,
    sampled_rows,
)
from tolerance import FLOAT32

SCORES = torch.tensor([2.0, -3.0, 0.5, 2.0, -1.0])
ALL = torch.ones(5, dtype=torch.bool)
# The highest and the lowest score are those of rows without a score, which are stored as 0, or of filtered rows.
SOME = torch.tensor([True, False, True, False, True])
WEIGHS = {
    "square": partial(power_weights, power=2.0),
    "power 1.5": partial(power_weights, power=1.5),
    "max_min": max_min_weights,
    "max_random": max_random_weights,
}


@pytest.mark.parametrize(
    ("name", "of_verl", "of_some"),
    [
        ("square", [4.0, 9.0, 0.25, 4.0, 1.0], [4.0, 0.0, 0.25, 0.0, 1.0]),
        ("power 1.5", [2.8284271, 5.1961524, 0.3535534, 2.8284271, 1.0], [2.8284271, 0.0, 0.3535534, 0.0, 1.0]),
        ("max_min", [1.0, 1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0]),
        ("max_random", [0.4, 0.1, 0.1, 0.4, 0.1], [0.4, 0.0, 0.1, 0.0, 0.1]),
    ],
)
def test_weights_are_proportional_to_those_of_verl(name: str, of_verl: list[float], of_some: list[float]) -> None:
    """The values are those of verl's `compute_pf_ppo_reweight_data` (August 2026); only their ratios matter."""
    for valid, expected in ((ALL, of_verl), (SOME, of_some)):
        found, given = WEIGHS[name](SCORES, valid), torch.tensor(expected, dtype=torch.float64)
        FLOAT32.check((found / found.sum()).float(), (given / given.sum()).float())


@pytest.mark.parametrize("name", WEIGHS)
@pytest.mark.parametrize("score", [0.0, -2.0])
def test_rows_with_equal_scores_are_equally_likely(name: str, score: float) -> None:
    weights = or_uniform(WEIGHS[name](torch.full((5,), score), SOME), SOME)
    assert (weights / weights.sum()).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])
    assert effective_rows(weights) == pytest.approx(3.0)


def test_large_scores_and_powers_are_finite() -> None:
    weights = power_weights(torch.tensor([3e38, -1.5e38, 1e-30]), torch.ones(3, dtype=torch.bool), power=20.0)
    assert weights.tolist() == pytest.approx([1.0, 0.5**20, 0.0])


def test_effective_number_of_rows_by_hand() -> None:
    # (4 + 1 + 1)^2 / (16 + 1 + 1) = 2
    assert effective_rows(torch.tensor([4.0, 1.0, 0.0, 1.0], dtype=torch.float64)) == 2.0
    assert effective_rows(torch.tensor([0.4, 0.0, 0.0, 0.0], dtype=torch.float64)) == 1.0


def test_rows_are_sampled_in_proportion_to_their_weights() -> None:
    weights = torch.zeros(20_000, dtype=torch.float64)
    weights[[1, 7, 19_999]] = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    rows = sampled_rows(weights, seed=3)
    counts = torch.bincount(rows, minlength=20_000)
    assert len(rows) == 20_000
    assert counts.nonzero().flatten().tolist() == [1, 7, 19_999]
    # Four standard deviations of the count with probability 5/8: 4 sqrt(20000 x 5/8 x 3/8) = 274
    for row, expected in ((1, 2500), (7, 5000), (19_999, 12_500)):
        assert abs(int(counts[row]) - expected) < 274
    assert torch.equal(rows, sampled_rows(weights, seed=3))
    assert not torch.equal(rows, sampled_rows(weights, seed=4))
    state = torch.get_rng_state()
    sampled_rows(weights, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not advanced"
