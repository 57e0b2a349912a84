"""Estimators of a KL divergence: their values, and their gradients."""

import math

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.formulas.kl import KlEstimator
from tolerance import EXACT, FLOAT32

LN2 = math.log(2.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [[-LN2, LN2, 0.0]]),  # -d with d = ln 2, -ln 2, 0
        ("k2", [[LN2**2 / 2, LN2**2 / 2, 0.0]]),
        ("k3", [[2 - 1 - LN2, 0.5 - 1 + LN2, 0.0]]),  # exp(d) - 1 - d
        ("abs", [[LN2, LN2, 0.0]]),  # |d|
    ],
)
def test_kl_estimates_of_three_tokens_by_hand(kind, expected):
    logprobs = torch.tensor([[-2.0, -2.0, -2.0]])
    other = torch.tensor([[-2.0 + LN2, -2.0 - LN2, -2.0]])
    FLOAT32.check(KlEstimator(kind).estimates(logprobs, other), torch.tensor(expected))


def expected_gradient(kind, logits, other_logits):
    """Return the exact mean, over tokens of pi, of the estimator's gradient with respect to the logits of pi."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    estimate = KlEstimator(kind).estimates(logprobs[None], other_logits.log_softmax(-1)[None])[0]
    (logprobs.exp().detach() * estimate).sum().backward()
    return logits.grad


def true_gradient(divergence, logits, other_logits):
    logits = logits.clone().requires_grad_()
    p, q = logits.log_softmax(-1), other_logits.log_softmax(-1)
    divergence(p, q).backward()
    return logits.grad


def test_k1_and_k3_expectation_equals_divergence():
    p, q = normal(5, seed=0).double().log_softmax(-1), normal(5, seed=1).double().log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        FLOAT32.check((p.exp() * KlEstimator(kind).estimates(p[None], q[None])[0]).sum(), divergence)


def test_k2_expectation_equals_divergence_to_second_order():
    # Half the distance gives a quarter of the divergence and 1/8 of the error of k2.
    logits, direction = normal(5, seed=0).double(), normal(5, seed=1).double()
    off = []
    for step in (0.02, 0.01):
        p, q = logits.log_softmax(-1), (logits + step * direction).log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum()
        estimate = (p.exp() * KlEstimator("k2").estimates(p[None], q[None])[0]).sum()
        off.append(((estimate - divergence).abs() / divergence).item())
    assert off[0] < 0.02
    assert 1.9 < off[0] / off[1] < 2.1


def test_k1_loss_has_zero_expected_gradient():
    FLOAT32.check(expected_gradient("k1", normal(5, seed=0), normal(5, seed=1)), torch.zeros(5))


def test_k2_loss_gradient_descends_forward_kl():
    logits, other = normal(5, seed=0), normal(5, seed=1)
    expected = true_gradient(lambda p, q: (p.exp() * (p - q)).sum(), logits, other)
    FLOAT32.check(expected_gradient("k2", logits, other), expected)


def test_k3_loss_gradient_descends_reverse_kl():
    logits, other = normal(5, seed=0), normal(5, seed=1)
    expected = true_gradient(lambda p, q: (q.exp() * (q - p)).sum(), logits, other)
    FLOAT32.check(expected_gradient("k3", logits, other), expected)


def test_k3_is_finite_without_gradient_for_improbable_policy_tokens():
    logprobs = torch.tensor([[-300.0, -1.0]], requires_grad=True)
    estimate = KlEstimator("k3").estimates(logprobs, torch.tensor([[-1.0, -2.0]]))
    FLOAT32.check(estimate, torch.tensor([[math.exp(20) - 21, math.exp(-1)]]))
    estimate.sum().backward()
    FLOAT32.check(logprobs.grad, torch.tensor([[0.0, 1 - math.exp(-1)]]))


def test_k3_keeps_gradient_for_improbable_reference_tokens():
    # d = -21, -299: exp(d) - 1 - d = -1 - d with gradient 1 - exp(d) = 1, at any distance.
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    estimate = KlEstimator("k3").estimates(logprobs, torch.tensor([[-22.0, -300.0]]))
    FLOAT32.check(estimate, torch.tensor([[20.0, 298.0]]))
    estimate.sum().backward()
    FLOAT32.check(logprobs.grad, torch.ones(1, 2))


def test_k3_of_nearly_equal_policies_keeps_precision():
    # exp(d) - 1 - d is about d^2 / 2 for this d. It is compared in units of d^2, so that the tolerance is meaningful.
    d = torch.full((1, 1), 1e-3)
    FLOAT32.check(KlEstimator("k2").estimates(torch.zeros(1, 1), d) * 2e6, torch.ones(1, 1))
    assert 0.99 < (KlEstimator("k3").estimates(torch.zeros(1, 1), d) * 2e6).item() < 1.01


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_value_and_gradient_ignore_masked_garbage(kind, garbage):
    mask = holey_mask(3, 6, seed=0)
    results = []
    for bad in (0.0, garbage):
        logprobs = poisoned(normal(3, 6, seed=1), mask, bad).requires_grad_()
        estimate = KlEstimator(kind).estimates(logprobs, poisoned(normal(3, 6, seed=2), mask, -bad), mask)
        estimate.sum().backward()
        results.append((estimate, logprobs.grad))
    EXACT.check(results[1][0], results[0][0])
    EXACT.check(results[1][1], results[0][1])
    EXACT.check(results[1][1][~mask], torch.zeros(int((~mask).sum())))
    EXACT.check(results[1][0][~mask], torch.zeros(int((~mask).sum())))


def test_k3_does_not_overflow_with_any_clamp():
    far = KlEstimator("k3", input_clamp=100.0).estimates(torch.tensor([[-300.0]]), torch.tensor([[-1.0]]))
    FLOAT32.check(far, torch.tensor([[math.exp(20) - 21]]))


LOGPROBS = [[-1.0, -2.0, -3.0], [-0.5, -1.5, -9.0]]
REFERENCE = [[-1.5, -1.0, -3.0], [-1.5, -1.0, -9.0]]
OLD = [[-1.0 - LN2, -2.0, -3.0], [-0.5, -1.5 + LN2, -9.0]]
COUNTS = [[True, True, True], [True, True, False]]
# With k1 the estimates are logp - ref = 0.5, -1, 0; 1, -0.5.
BY_HAND = {
    # gradient of the formula: 1 each
    "estimator": ([[0.5, -1.0, 0.0], [1.0, -0.5, 0.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
    # gradient of k2: logp - ref
    "k2": ([[0.5, -1.0, 0.0], [1.0, -0.5, 0.0]], [[0.5, -1.0, 0.0], [1.0, -0.5, 0.0]]),
    # 1 + estimate
    "score_function": ([[0.5, -1.0, 0.0], [1.0, -0.5, 0.0]], [[1.5, 0.0, 1.0], [2.0, 0.5, 0.0]]),
    # new / old = 2, 1, 1; 1, 1/2: times the estimates, and times 1 + estimate
    "importance": ([[1.0, -1.0, 0.0], [1.0, -0.25, 0.0]], [[3.0, 0.0, 1.0], [2.0, 0.25, 0.0]]),
}


@pytest.mark.parametrize("gradient", BY_HAND)
def test_kl_gradient_kinds_by_hand(gradient):
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    other, old = torch.tensor(REFERENCE, requires_grad=True), torch.tensor(OLD, requires_grad=True)
    mask = torch.tensor(COUNTS)
    found = KlEstimator("k1").losses(logprobs, other.detach(), old, mask, gradient=gradient)
    value, pull = BY_HAND[gradient]
    FLOAT32.check(found, torch.tensor(value))
    found.sum().backward()
    FLOAT32.check(logprobs.grad, torch.tensor(pull))
    assert old.grad is None


def mean_gradient(kind, gradient, logits, other_logits, sampled_from):
    """Return the exact mean, over tokens of `sampled_from`, of the gradient of a form with respect to the logits of
    pi."""
    logits = logits.clone().requires_grad_()
    logprobs, other = logits.log_softmax(-1)[None], other_logits.log_softmax(-1)[None]
    old = sampled_from.log_softmax(-1)[None]
    losses = KlEstimator(kind).losses(logprobs, other, old, torch.ones(1, 5) > 0, gradient=gradient)
    (old.exp() * losses).sum().backward()
    return logits.grad


def forward_kl(p, q):
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_score_function_descends_forward_kl(kind):
    logits, other = normal(5, seed=0), normal(5, seed=1)
    found = mean_gradient(kind, "score_function", logits, other, sampled_from=logits)
    FLOAT32.check(found, true_gradient(forward_kl, logits, other))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_only_importance_is_unbiased_for_off_policy_tokens(kind):
    logits, other, old = (normal(5, seed=seed) for seed in range(3))
    true = true_gradient(forward_kl, logits, other)
    FLOAT32.check(mean_gradient(kind, "importance", logits, other, sampled_from=old), true)
    off = mean_gradient(kind, "score_function", logits, other, sampled_from=old)
    assert (off - true).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["k1", "k3", "abs"])
def test_straight_through_descends_forward_kl(kind):
    logits, other = normal(5, seed=0), normal(5, seed=1)
    found = mean_gradient(kind, "k2", logits, other, sampled_from=logits)
    FLOAT32.check(found, true_gradient(forward_kl, logits, other))


@pytest.mark.parametrize(
    ("gradient", "clamps"),
    [
        ("estimator", {}),
        ("estimator", {"input_clamp": 0.9, "output_clamp": 0.3}),
        ("importance", {}),
        ("importance", {"output_clamp": 0.3}),
    ],
)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_gradients_match_finite_differences(kind, gradient, clamps):
    """Exceptions are the straight-through estimator, the score function, and a weight that the input clamp makes
    constant: test_kl_clamps.py covers these."""
    mask = holey_mask(3, 4, seed=0)
    logprobs, other, old = (normal(3, 4, seed=seed).double() for seed in (1, 2, 3))

    def losses(pi):
        return KlEstimator(kind, **clamps).losses(pi, other, old, mask, gradient=gradient)

    assert torch.autograd.gradcheck(losses, logprobs.requires_grad_())


@given(
    seed=st.integers(0, 99),
    size=st.sampled_from([1e-6, 1.0, 300.0, 1e6]),
    kind=st.sampled_from(["k1", "k2", "k3", "abs"]),
    gradient=st.sampled_from(["estimator", "k2", "score_function", "importance"]),
    clamp=st.sampled_from([None, 1e-3, 20.0]),
    empty=st.sampled_from([(), (0,), (0, 1, 2)]),
)
def test_kl_loss_is_finite_for_any_logprobs_and_mask(seed, size, kind, gradient, clamp, empty):
    mask = holey_mask(3, 4, seed=seed)
    mask[list(empty)] = False
    logprobs, other, old = (poisoned(normal(3, 4, seed=seed + n) * size, mask, math.nan) for n in range(3))
    logprobs.requires_grad_()
    found = KlEstimator(kind, clamp, clamp).losses(logprobs, other, old, mask, gradient=gradient)
    found.sum().backward()
    for grid in (found, logprobs.grad):
        assert torch.isfinite(grid).all()
        assert not grid[~mask].any()
