"""Expectation of the KL estimators over tokens sampled from the policy: the sum over the vocabulary, or for k2
approximately that. Means of 200,000 samples must be within five standard errors."""

import pytest
import torch

from ppoctl.ppo.kl import KlEstimator, KlKind

DRAWS = 200_000


def policies(apart: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of two policies over 30 ids in float64, about `apart` nats from each other."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(30, generator=generator, dtype=torch.float64)
    nudge = torch.randn(30, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1), (logits + apart * nudge).log_softmax(-1)


def exact(pi: torch.Tensor, other: torch.Tensor) -> float:
    return float((pi.exp() * (pi - other)).sum())


def mean_and_error(kind: KlKind, pi: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the mean of the estimates of sampled tokens, and its standard error."""
    sampled = torch.multinomial(pi.exp(), DRAWS, replacement=True, generator=torch.Generator().manual_seed(3))
    found = KlEstimator(kind).estimates(pi[sampled][None], other[sampled][None])
    return float(found.mean()), float(found.std()) / DRAWS**0.5


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("apart", [0.3, 0.6, 1.0])
def test_sampled_k1_and_k3_average_to_full_kl(kind: KlKind, apart: float) -> None:
    pi, other = policies(apart)
    mean, error = mean_and_error(kind, pi, other)
    assert abs(mean - exact(pi, other)) < 5 * error
    assert 5 * error < 0.1 * exact(pi, other)  # otherwise the bound would be too wide to test anything


def test_k2_agrees_with_full_kl_to_second_order() -> None:
    """Halving the distance between close policies quarters the KL, and divides the bias by eight or more."""
    biases = []
    for apart in (0.2, 0.1, 0.05):
        pi, other = policies(apart)
        k2 = KlEstimator("k2").estimates(pi[None], other[None])[0]
        biases.append(abs(float((pi.exp() * k2).sum()) - exact(pi, other)))
        assert biases[-1] < apart * exact(pi, other)
    assert biases[0] / biases[1] > 6
    assert biases[1] / biases[2] > 6


def test_abs_average_equals_its_formula_and_not_kl() -> None:
    pi, other = policies(0.5)
    mean, error = mean_and_error("abs", pi, other)
    formula = float((pi.exp() * (pi - other).abs()).sum())
    assert abs(mean - formula) < 5 * error
    assert formula > 2 * exact(pi, other)
