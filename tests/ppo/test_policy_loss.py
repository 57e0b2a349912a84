"""The clipped policy loss: its value, the regions without gradient, and invariances."""

import math

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned, policy_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from ppoctl.ppo.masking import masked_mean
from ppoctl.ppo.policy_loss import PolicyClip, token_ratios
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


def example(*, seed):
    logprobs = normal(6, 5, seed=seed) * 0.5
    return logprobs, normal(6, 5, seed=seed + 1) * 0.5, normal(6, 5, seed=seed + 2), holey_mask(6, 5, seed=seed + 3)


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


def test_clip_loss_at_ratio_one_is_minus_mean_advantage():
    logprobs, _, advantages, mask = example(seed=0)
    n = int(mask.sum())
    loss, gradient = loss_and_gradient(logprobs, logprobs, advantages, mask, clip=CLIP, over=n)
    FLOAT32.check(loss, -masked_mean(advantages, mask))
    FLOAT32.check(gradient * n, torch.where(mask, -advantages, 0))


def test_policy_loss_of_microbatches_adds_up():
    logprobs, old, advantages, mask = example(seed=0)
    n = int(mask.sum())
    whole, gradient = loss_and_gradient(logprobs, old, advantages, mask, clip=CLIP, over=n)
    parts = [
        loss_and_gradient(logprobs[r], old[r], advantages[r], mask[r], clip=CLIP, over=n)
        for r in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    FLOAT32.check(sum(loss for loss, _ in parts), whole)
    FLOAT32.check(torch.cat([part for _, part in parts]), gradient)


def test_clip_loss_ignores_padding_and_row_order():
    logprobs, old, advantages, mask = example(seed=0)
    expected = mean_loss(logprobs, old, advantages, mask, clip=CLIP, over=9)
    moved = [torch.nn.functional.pad(x.flip(0), (0, 4)) for x in (logprobs, old, advantages, mask)]
    FLOAT32.check(mean_loss(*moved, clip=CLIP, over=9), expected)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_clip_loss_and_gradient_ignore_masked_garbage(garbage):
    logprobs, old, advantages, mask = example(seed=0)
    results = []
    for bad in (0.0, garbage):
        grids = [poisoned(x, mask, bad) for x in (logprobs, old, advantages)]
        # Anomaly mode: intermediate gradients are not NaN either.
        with torch.autograd.set_detect_anomaly(True):
            results.append(loss_and_gradient(*grids, mask, clip=CLIP, over=20))
    EXACT.check(results[1][0], results[0][0])
    EXACT.check(results[1][1], results[0][1])
    EXACT.check(results[1][1][~mask], torch.zeros(int((~mask).sum())))


def test_masked_ratios_are_one():
    ratios = token_ratios(torch.tensor([[math.log(2), 5.0]]), torch.zeros(1, 2), torch.tensor([[True, False]]))
    FLOAT32.check(ratios, torch.tensor([[2.0, 1.0]]))


def test_advantage_weights_scale_clip_loss():
    weights = torch.tensor([[2.0, 0.0, 1.0], [1.0, 3.0, 0.5]])
    loss, _ = loss_and_gradient(RATIOS.log(), OLD, ADVANTAGES * weights, EVERY, clip=CLIP, over=6)
    # 2 x -1.3 + 0 x -0.5 + 1 x -2.2 + 1 x 1.5 + 3 x 0.8 + 0.5 x 6
    FLOAT32.check(loss, 2.1 / 6)


def test_only_new_logprobs_receive_gradient_in_clip_loss():
    logprobs, old, advantages, mask = example(seed=0)
    old.requires_grad_()
    advantages.requires_grad_()
    mean_loss(logprobs.requires_grad_(), old, advantages, mask, clip=CLIP, over=9).backward()
    assert logprobs.grad is not None
    assert old.grad is None
    assert advantages.grad is None


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


@settings(deadline=None, max_examples=40)
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
    with pytest.raises(ValueError, match=f"{name} is"):
        PolicyClip(*values)
