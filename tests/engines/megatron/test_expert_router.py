"""Which experts a token goes to, by numbers one can check by hand."""

from types import SimpleNamespace

import pytest
import torch

from ppoctl.engines.megatron.router import SoftmaxRouter
from tolerance import EXACT, FLOAT32


def route(logits: torch.Tensor, *, topk: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of tokens with these logits, `[tokens, experts]`."""
    router = SimpleNamespace(num_experts=logits.shape[1], topk=topk, renormalise=renormalise)
    return SoftmaxRouter.routing(router, logits[:, None])


@pytest.mark.parametrize(
    ("renormalise", "weights"), [(False, [[0.0, 0.4, 0.0, 0.3]]), (True, [[0.0, 4 / 7, 0.0, 3 / 7]])]
)
def test_the_two_most_likely_experts_share_the_token(renormalise, weights):
    probs, chosen = route(torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log(), topk=2, renormalise=renormalise)
    FLOAT32.check(probs, torch.tensor(weights))
    assert chosen.tolist() == [[False, True, False, True]]


def test_the_choice_is_made_before_rounding_to_bfloat16():
    """Probabilities 0.49975 and 0.50025 are both 0.5 in bfloat16, where the first would win."""
    probs, chosen = route(torch.tensor([[0.0, 0.001]], dtype=torch.bfloat16), topk=1, renormalise=False)
    assert chosen.tolist() == [[False, True]]
    EXACT.check(probs, torch.tensor([[0.0, 0.5]], dtype=torch.bfloat16))


def test_a_token_is_routed_the_same_in_any_company():
    tokens = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    probs, chosen = route(tokens, topk=3, renormalise=True)
    for row in (0, 17, 49):
        alone = route(tokens[row : row + 1], topk=3, renormalise=True)
        EXACT.check(alone[0][0], probs[row])
        EXACT.check(alone[1][0], chosen[row])
