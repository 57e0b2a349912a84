"""The clipped policy loss: its value, the regions without gradient, and invariances."""

import math

import pytest
import torch
from grids import policy_inputs
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.formulas.policy_loss import PolicyClip, token_ratios
from tolerance import EXACT, FLOAT32

CLIP = PolicyClip(low=0.2, high=0.3, dual=3.0)
NO_DUAL = PolicyClip(low=0.2, high=0.3, dual=None)

# Two sequences of three tokens; old log-probs are 0, so that exp(logprobs) is the ratio.
RATIOS = torch.tensor([[1.5, 0.5, 1.1], [1.5, 0.5, 4.0]])
OLD = torch.zeros(2, 3)
ADVANTAGES = torch.tensor([[1.0, 1.0, 2.0], [-1.0, -1.0, -2.0]])
EVERY = torch.ones(2, 3, dtype=torch.bool)


def mean_loss(*args, clip, over):
    """Return the losses of all tokens divided by a count."""
    return clip.losses(policy_inputs(*args)).sum() / over


def loss_and_gradient(logprobs, *args, **kwargs):
    logprobs = logprobs.detach().clone().requires_grad_()
    loss = mean_loss(logprobs, *args, **kwargs)
    loss.backward()
    return loss.detach(), logprobs.grad


def test_clip_loss_of_six_tokens_by_hand():
    # row 0, A > 0, -A min(ratio, clipped): -1.3 (clipped high), -0.5, -2 x 1.1; sum -4.0
    # row 1, A < 0, -A max(ratio, clipped): 1.5, 0.8 (clipped low), 2 x 3 (dual, instead of 2 x 4); sum 8.3
    loss, gradient = loss_and_gradient(RATIOS.log(), OLD, ADVANTAGES, EVERY, clip=CLIP, over=6)
    FLOAT32.check(loss, 4.3 / 6)
    # d(-A ratio) / d logprob = -A ratio if nothing is clipped, otherwise 0
    FLOAT32.check(gradient * 6, torch.tensor([[0.0, -0.5, -2.2], [1.5, 0.0, 0.0]]))


def test_clip_loss_without_dual_clip_by_hand():
    loss, gradient = loss_and_gradient(RATIOS.log(), OLD, ADVANTAGES, EVERY, clip=NO_DUAL, over=6)
    FLOAT32.check(loss, 6.3 / 6)  # 8 instead of 6 for the last token
    FLOAT32.check(gradient[1, 2] * 6, 8.0)


def test_dual_clip_ignores_positive_advantages():
    ratio = torch.tensor([[4.0]])
    wide = PolicyClip(low=0.2, high=9.0, dual=3.0)
    loss = mean_loss(ratio.log(), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1).bool(), clip=wide, over=1)
    FLOAT32.check(loss, -4.0)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (-2.0, 5.0, 6.0),  # min(5 x -2, 1.3 x -2) = -10; max(-10, 3 x -2) = -6
        (-2.0, 2.0, 4.0),  # min(-4, -2.6) = -4; max(-4, -6) = -4
        (-2.0, 0.5, 1.6),  # min(-1, 0.8 x -2) = -1.6
        (2.0, 5.0, -2.6),  # min(10, 1.3 x 2) = 2.6; the dual clip is for negative advantages
    ],
)
def test_dual_clip_by_paper(advantage, ratio, expected):
    """Ye et al. 2020 (arXiv:1912.09729), dual-clipped PPO: max(min(r A, clip(r) A), c A) if A < 0, here with clips
    0.2 and 0.3 and c = 3; the loss is its negative."""
    one = torch.ones(1, 1)
    loss = CLIP.losses(policy_inputs(one * math.log(ratio), 0 * one, one * advantage, one.bool()))
    FLOAT32.check(loss, torch.tensor([[expected]]))


def test_masked_ratios_are_one():
    ratios = token_ratios(torch.tensor([[math.log(2), 5.0]]), torch.zeros(1, 2), torch.tensor([[True, False]]))
    FLOAT32.check(ratios, torch.tensor([[2.0, 1.0]]))


def test_clip_loss_of_token_300_nats_away_is_finite():
    far = torch.tensor([[300.0, -300.0]])
    loss, gradient = loss_and_gradient(
        far,
        torch.zeros(1, 2),
        torch.tensor([[-1.0, 1.0]]),
        torch.ones(1, 2).bool(),
        clip=NO_DUAL,
        over=1,
    )
    FLOAT32.check(loss, math.exp(20))
    EXACT.check(gradient, torch.zeros(1, 2))


@given(ratio=st.floats(0.05, 6.0), advantage=st.floats(-3, 3), dual=st.sampled_from([None, 1.5, 3.0]))
def test_clip_loss_equals_textbook_formula(ratio, advantage, dual):
    clip = PolicyClip(low=0.2, high=0.28, dual=dual)
    expected = -min(advantage * ratio, advantage * min(max(ratio, 0.8), 1.28))
    if dual is not None and advantage < 0:
        expected = min(expected, -advantage * dual)
    one = torch.ones(1, 1)
    loss = mean_loss(one * math.log(ratio), 0 * one, one * advantage, one.bool(), clip=clip, over=1)
    FLOAT32.check(loss, expected)


@pytest.mark.parametrize(
    ("values", "name"),
    [((-0.1, 0.2, None), "low"), ((1.1, 0.2, None), "low"), ((0.2, -0.1, None), "high"), ((0.2, 0.2, 1.0), "dual")],
)
def test_policy_clip_rejects_impossible_bounds(values, name):
    for possible in ((0.0, 0.0, None), (1.0, 0.0, 1.001)):
        PolicyClip(*possible)
    with pytest.raises(ValueError, match=f"{name} is"):
        PolicyClip(*values)
