"""The clipped value loss: its value, the regions without gradient, and invariances."""

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned

from ppoctl.algorithms.formulas.value_loss import clipped_value_losses
from tolerance import EXACT, FLOAT32

VALUES = torch.tensor([[1.0, 1.0], [0.2, -1.0]])
OLD = torch.zeros(2, 2)
RETURNS = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
EVERY = torch.ones(2, 2, dtype=torch.bool)


def mean_loss(*args, over, **kwargs):
    """Return the losses of all tokens divided by a count."""
    return clipped_value_losses(*args, **kwargs).sum() / over


def loss_and_gradient(values, *args, **kwargs):
    values = values.detach().clone().requires_grad_()
    loss = mean_loss(values, *args, **kwargs)
    loss.backward()
    return loss.detach(), values.grad


def example(*, seed):
    return (*(normal(6, 5, seed=seed + i) for i in range(3)), holey_mask(6, 5, seed=seed + 3))


def test_value_loss_of_four_tokens_by_hand():
    # clip 0.5 around 0:   e1 = (1 - 2)^2 = 1          e2 = (0.5 - 2)^2 = 2.25 <- larger: no gradient
    #                      e1 = (1 - 0)^2 = 1 <-       e2 = 0.5^2 = 0.25
    #                      e1 = (0.2 - 1)^2 = 0.64     e2 = 0.64, nothing is clipped
    #                      e1 = (-1 - 1)^2 = 4 <-      e2 = (-0.5 - 1)^2 = 2.25
    loss, gradient = loss_and_gradient(VALUES, OLD, RETURNS, EVERY, clip=0.5, over=4)
    FLOAT32.check(loss, (2.25 + 1 + 0.64 + 4) / 2 / 4)
    # d (e1 / 2) / d V = V - G
    FLOAT32.check(gradient * 4, torch.tensor([[0.0, 1.0], [-0.8, -2.0]]))


def test_value_loss_without_clip_is_half_squared_error():
    loss, gradient = loss_and_gradient(VALUES, OLD, RETURNS, EVERY, clip=None, over=4)
    FLOAT32.check(loss, (1 + 1 + 0.64 + 4) / 2 / 4)
    FLOAT32.check(gradient * 4, VALUES - RETURNS)


def test_value_clip_is_centered_on_old_values():
    values, old, returns, mask = example(seed=0)
    moved = mean_loss(values + 7, old + 7, returns + 7, mask, clip=0.2, over=9)
    FLOAT32.check(moved, mean_loss(values, old, returns, mask, clip=0.2, over=9))


@pytest.mark.parametrize("clip", [0.3, None])
def test_value_loss_of_microbatches_adds_up(clip):
    values, old, returns, mask = example(seed=0)
    n = int(mask.sum())
    whole, gradient = loss_and_gradient(values, old, returns, mask, clip=clip, over=n)
    parts = [
        loss_and_gradient(values[r], old[r], returns[r], mask[r], clip=clip, over=n)
        for r in (slice(0, 2), slice(2, 3), slice(3, 6))
    ]
    FLOAT32.check(sum(loss for loss, _ in parts), whole)
    FLOAT32.check(torch.cat([part for _, part in parts]), gradient)


def test_value_loss_ignores_padding_and_row_order():
    grids = example(seed=0)
    moved = [torch.nn.functional.pad(x.flip(0), (0, 4)) for x in grids]
    expected = mean_loss(*grids, clip=0.3, over=9)
    FLOAT32.check(mean_loss(*moved, clip=0.3, over=9), expected)


@pytest.mark.parametrize("clip", [0.3, None])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_value_loss_and_gradient_ignore_masked_garbage(garbage, clip):
    *grids, mask = example(seed=0)
    results = [
        loss_and_gradient(*(poisoned(x, mask, bad) for x in grids), mask, clip=clip, over=20)
        for bad in (0.0, garbage)
    ]
    EXACT.check(results[1][0], results[0][0])
    EXACT.check(results[1][1], results[0][1])
    EXACT.check(results[1][1][~mask], torch.zeros(int((~mask).sum())))


def test_only_new_values_receive_gradient():
    values, old, returns, mask = example(seed=0)
    old.requires_grad_()
    returns.requires_grad_()
    mean_loss(values.requires_grad_(), old, returns, mask, clip=0.3, over=9).backward()
    assert values.grad is not None
    assert old.grad is None
    assert returns.grad is None


def test_value_loss_rejects_clip_of_zero():
    with pytest.raises(ValueError, match="clip is"):
        mean_loss(VALUES, OLD, RETURNS, EVERY, clip=0.0, over=4)
