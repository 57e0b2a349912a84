"""Sums, means and whitening over unmasked tokens."""

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.formulas.masking import masked_mean, masked_sum, masked_variance, whiten
from tolerance import EXACT, FLOAT32

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[True, True, False], [False, True, False]])  # selects 1, 2 and 5


def test_masked_sum_mean_and_variance_by_hand():
    EXACT.check(masked_sum(X, MASK), 8.0)  # 1 + 2 + 5
    FLOAT32.check(masked_mean(X, MASK), 8 / 3)
    # deviations -5/3, -2/3, 7/3: squares 25/9 + 4/9 + 49/9 = 78/9; by n - 1 = 2: 39/9
    FLOAT32.check(masked_variance(X, MASK), 39 / 9)


def test_whitening_divides_by_sample_standard_deviation():
    """(x - mean) / sqrt(var + 1e-8) with the unbiased variance, as verl and NeMo-RL compute it."""
    # 1, 2 and 6: mean 3, squares 4 + 1 + 9 = 14 over n - 1 = 2: variance 7 (14 / 3 would be the population's).
    x = torch.tensor([[1.0, -77.0, 2.0], [-77.0, 6.0, -77.0]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    root = 7**0.5
    expected = torch.tensor([[-2 / root, 0.0, -1 / root], [0.0, 3 / root, 0.0]])
    FLOAT32.check(whiten(x, mask), expected)


def test_masked_sums_of_splits_add_up():
    x, mask = normal(6, 5, seed=0), holey_mask(6, 5, seed=1)
    parts = [masked_sum(x[rows], mask[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    FLOAT32.check(sum(parts) / int(mask.sum()), masked_mean(x, mask))


def test_masked_sum_without_unmasked_tokens_is_zero():
    EXACT.check(masked_sum(X, torch.zeros_like(MASK)), 0.0)


@pytest.mark.parametrize("statistic", [masked_mean, masked_variance, whiten])
def test_statistics_require_an_unmasked_token(statistic):
    with pytest.raises(ValueError, match="0 unmasked tokens"):
        statistic(X, torch.zeros_like(MASK))


def test_single_unmasked_token_has_zero_variance_and_whitens_to_0():
    one = torch.tensor([[False, False, False], [False, True, False]])
    EXACT.check(masked_variance(X, one), 0.0)
    EXACT.check(whiten(X, one), torch.zeros_like(X))


def test_equal_values_whiten_to_zeros():
    EXACT.check(whiten(torch.full((2, 3), 7.0), MASK), torch.zeros(2, 3))


def test_rounding_differences_whiten_to_zeros():
    # 1000.1 is not a float32: a mean taken in float32 is off by a rounding error, which the division turned into
    # -0.51.
    for equal in (1000.1, -0.1, 1e-30, 3e30):
        x = torch.full((7, 13), equal)
        EXACT.check(whiten(x, x == x), torch.zeros_like(x))
        x[2, 5:9] = x[0, 0] * (1 + 2**-23)  # the next float32
        EXACT.check(whiten(x, x == x), torch.zeros_like(x))
        EXACT.check(masked_variance(x, x == x), 0.0)


def test_small_standard_deviation_is_not_rounded_to_zero():
    # Two of 1000 and one 1001: mean 1000 + 1/3, variance (1/9 + 1/9 + 4/9) / 2 = 1/3.
    x = torch.tensor([[1000.0, 1001.0, 1000.0]])
    root = 3**-0.5
    FLOAT32.check(whiten(x, x == x), torch.tensor([[-root, 2 * root, -root]]))
    # A standard deviation of 1e-3 at a mean of 1000, a millionth of it, still counts.
    x = torch.tensor([[1000.0, 1000.0 + 2**-10]])
    FLOAT32.check(masked_variance(x, x == x) * 2**21, 1.0)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_variance, whiten])
def test_masked_statistics_ignore_masked_garbage(function, garbage):
    mask = holey_mask(4, 7, seed=2)
    results = []
    for x in (poisoned(normal(4, 7, seed=3), mask, 0.0), poisoned(normal(4, 7, seed=3), mask, garbage)):
        x.requires_grad_()
        value = function(x, mask)
        value.square().sum().backward()
        results.append((value, x.grad))
    EXACT.check(results[1][0], results[0][0])
    EXACT.check(results[1][1][mask], results[0][1][mask])


@given(seed=st.integers(0, 2**31), shift=st.floats(-100, 100), scale=st.floats(0.01, 100))
def test_whitened_values_have_mean_0_and_variance_1(seed, shift, scale):
    mask = holey_mask(3, 9, seed=seed)
    whitened = whiten((normal(3, 9, seed=seed).double() * scale + shift), mask)
    FLOAT32.check(masked_mean(whitened, mask), 0.0)
    # The 1e-8 under the root reduces a variance of scale^2, here at least 1e-4, by at most a fraction of 1e-4.
    expected = masked_variance(normal(3, 9, seed=seed).double() * scale, mask)
    FLOAT32.check(masked_variance(whitened, mask), expected / (expected + 1e-8))
    EXACT.check(whitened[~mask], torch.zeros_like(whitened[~mask]))
