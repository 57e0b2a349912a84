"""Three estimators of a KL divergence: their values, and where their gradients pull."""

import math

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned

from ppoctl.ppo.kl import kl_estimate
from tolerance import EXACT, FLOAT32

LN2 = math.log(2.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [[-LN2, LN2, 0.0]]),  # -d with d = ln 2, -ln 2, 0
        ("k2", [[LN2**2 / 2, LN2**2 / 2, 0.0]]),
        ("k3", [[2 - 1 - LN2, 0.5 - 1 + LN2, 0.0]]),  # exp(d) - 1 - d
    ],
)
def test_three_tokens_by_hand(kind, expected):
    logprobs = torch.tensor([[-2.0, -2.0, -2.0]])
    other = torch.tensor([[-2.0 + LN2, -2.0 - LN2, -2.0]])
    FLOAT32.check(kl_estimate(logprobs, other, kind=kind), torch.tensor(expected))


def expected_gradient(kind, logits, other_logits):
    """The exact mean, over tokens of pi, of the estimator's gradient with respect to the logits of pi."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    estimate = kl_estimate(logprobs[None], other_logits.log_softmax(-1)[None], kind=kind)[0]
    (logprobs.exp().detach() * estimate).sum().backward()
    return logits.grad


def true_gradient(divergence, logits, other_logits):
    logits = logits.clone().requires_grad_()
    p, q = logits.log_softmax(-1), other_logits.log_softmax(-1)
    divergence(p, q).backward()
    return logits.grad


def test_k1_and_k3_average_to_the_divergence():
    p, q = normal(5, seed=0).double().log_softmax(-1), normal(5, seed=1).double().log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        FLOAT32.check((p.exp() * kl_estimate(p[None], q[None], kind=kind)[0]).sum(), divergence)


def test_as_a_loss_k1_pulls_nowhere():
    FLOAT32.check(expected_gradient("k1", normal(5, seed=0), normal(5, seed=1)), torch.zeros(5))


def test_as_a_loss_k2_descends_the_divergence_from_the_policy_to_the_other():
    logits, other = normal(5, seed=0), normal(5, seed=1)
    expected = true_gradient(lambda p, q: (p.exp() * (p - q)).sum(), logits, other)
    FLOAT32.check(expected_gradient("k2", logits, other), expected)


def test_as_a_loss_k3_descends_the_divergence_from_the_other_to_the_policy():
    logits, other = normal(5, seed=0), normal(5, seed=1)
    expected = true_gradient(lambda p, q: (q.exp() * (q - p)).sum(), logits, other)
    FLOAT32.check(expected_gradient("k3", logits, other), expected)


def test_k3_stays_finite_for_tokens_that_the_policy_would_hardly_say_and_lets_go_of_them():
    logprobs = torch.tensor([[-300.0, -1.0]], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([[-1.0, -2.0]]), kind="k3")
    FLOAT32.check(estimate, torch.tensor([[math.exp(20) - 21, math.exp(-1)]]))
    estimate.sum().backward()
    FLOAT32.check(logprobs.grad, torch.tensor([[0.0, 1 - math.exp(-1)]]))


def test_k3_holds_on_to_tokens_that_the_other_would_never_say():
    # d = -21, -299: exp(d) - 1 - d = -1 - d with gradient 1 - exp(d) = 1, however far.
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([[-22.0, -300.0]]), kind="k3")
    FLOAT32.check(estimate, torch.tensor([[20.0, 298.0]]))
    estimate.sum().backward()
    FLOAT32.check(logprobs.grad, torch.ones(1, 2))


def test_k3_of_nearly_equal_policies_keeps_its_digits():
    # exp(d) - 1 - d is d^2 / 2 there: in units of it, so that the level has something to bite on.
    d = torch.full((1, 1), 1e-3)
    FLOAT32.check(kl_estimate(torch.zeros(1, 1), d, kind="k2") * 2e6, torch.ones(1, 1))
    assert 0.99 < (kl_estimate(torch.zeros(1, 1), d, kind="k3") * 2e6).item() < 1.01


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_with_a_mask_garbage_changes_no_bit_of_value_or_gradient(kind, garbage):
    mask = holey_mask(3, 6, seed=0)
    results = []
    for bad in (0.0, garbage):
        logprobs = poisoned(normal(3, 6, seed=1), mask, bad).requires_grad_()
        estimate = kl_estimate(logprobs, poisoned(normal(3, 6, seed=2), mask, -bad), kind=kind, mask=mask)
        estimate.sum().backward()
        results.append((estimate, logprobs.grad))
    EXACT.check(results[1][0], results[0][0])
    EXACT.check(results[1][1], results[0][1])
    EXACT.check(results[1][1][~mask], torch.zeros(int((~mask).sum())))
    EXACT.check(results[1][0][~mask], torch.zeros(int((~mask).sum())))
