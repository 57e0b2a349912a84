"""The learning rate of each optimizer step, and the rows of each minibatch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_linear_schedule_with_warmup

from ppoctl.algorithms.formulas.learning_rate import LearningRate
from ppoctl.algorithms.formulas.minibatches import minibatch_rows
from tolerance import EXACT, FLOAT32


def rates(kind, *, warmup_ticks=2, total_ticks=6, min_frac=0.2, init_frac=None, num_ticks=8):
    rate = LearningRate(1.0, kind, warmup_ticks, total_ticks, min_frac, init_frac)
    return torch.tensor([rate.at(tick) for tick in range(num_ticks)])


def test_linear_schedule_by_hand():
    # warm-up 1/2, 1; then 4 ticks down to 0.2: minus 0.8 / 4 each; the floor from tick 6 on
    FLOAT32.check(rates("linear"), torch.tensor([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]))


def test_cosine_schedule_by_hand():
    # 0.2 + 0.8 (1 + cos(pi p)) / 2 with p = 0, 1/4, 1/2, 3/4, 1, and cos(pi / 4) = 0.7071068
    expected = [0.5, 1.0, 1.0, 0.6 + 0.4 * 0.7071068, 0.6, 0.6 - 0.4 * 0.7071068, 0.2, 0.2]
    FLOAT32.check(rates("cosine"), torch.tensor(expected))


def test_constant_schedule_stays_at_peak_after_warmup():
    expected = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0])
    FLOAT32.check(rates("constant", warmup_ticks=4), expected)


def test_warmup_from_initial_rate_by_hand():
    # 0.2 + 0.8 t / 4 for t = 0 ... 3, then the peak: Megatron-Core's warm-up
    expected = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0])
    FLOAT32.check(rates("constant", warmup_ticks=4, init_frac=0.2), expected)


def test_warmup_from_zero_equals_transformers():
    rate = LearningRate(3.0, "linear", 5, 12, 0.0, 0.0)
    model = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.0)
    theirs = get_linear_schedule_with_warmup(model, 5, 12)
    for tick in range(13):
        assert rate.at(tick) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        model.step()
        theirs.step()


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_ticks=st.integers(0, 20),
    total_ticks=st.integers(1, 50),
    min_frac=st.floats(0, 1),
    init_frac=st.none() | st.floats(0, 1),
)
def test_rate_rises_during_warmup_and_never_rises_after(kind, warmup_ticks, total_ticks, min_frac, init_frac):
    lengths = {"warmup_ticks": warmup_ticks, "total_ticks": total_ticks}
    found = rates(kind, **lengths, min_frac=min_frac, init_frac=init_frac, num_ticks=60)
    assert found[0] > 0 or init_frac is not None
    assert found.max() <= 1
    assert (found[warmup_ticks:].diff() <= 0).all()
    assert (found[:warmup_ticks].diff() >= 0).all()
    if warmup_ticks and init_frac is not None:
        FLOAT32.check(found[0], init_frac)


def test_rate_is_fraction_of_peak():
    FLOAT32.check(LearningRate(8.0, "linear", 2, 6, 0.2).at(3), 6.4)


@pytest.mark.parametrize(
    ("tick", "warmup_ticks", "shares", "message"),
    [
        (-1, 0, (0.0, None), "tick is -1"),
        (0, -1, (0.0, None), "warmup_ticks is -1"),
        (0, 0, (1.5, None), "min_frac is 1.5"),
        (0, 1, (0.0, -0.5), "warmup_init_frac is -0.5"),
    ],
)
def test_learning_rate_rejects_impossible_schedule(tick, warmup_ticks, shares, message):
    with pytest.raises(ValueError, match=message):
        LearningRate(1.0, "linear", warmup_ticks, 5, *shares).at(tick)


def test_minibatches_contain_every_row_once():
    parts = minibatch_rows(12, 4, seed=0)
    assert [part.shape for part in parts] == [(4,)] * 3
    EXACT.check(torch.cat(parts).sort().values, torch.arange(12))
    assert not torch.equal(torch.cat(parts), torch.arange(12))


def test_minibatch_order_depends_only_on_seed():
    torch.manual_seed(1)
    first = torch.cat(minibatch_rows(64, 8, seed=5))
    torch.manual_seed(2)
    EXACT.check(torch.cat(minibatch_rows(64, 8, seed=5)), first)
    assert not torch.equal(torch.cat(minibatch_rows(64, 8, seed=6)), first)


def test_minibatch_rows_leave_global_generator_unchanged():
    before = torch.random.get_rng_state()
    minibatch_rows(8, 2, seed=5)
    EXACT.check(torch.random.get_rng_state(), before)


def test_minibatch_rows_without_seed_stay_in_order():
    assert [part.tolist() for part in minibatch_rows(6, 2, seed=None)] == [[0, 1], [2, 3], [4, 5]]


def test_last_minibatch_has_the_remaining_rows():
    assert [part.tolist() for part in minibatch_rows(5, 2, seed=None)] == [[0, 1], [2, 3], [4]]
    assert [len(part) for part in minibatch_rows(10, 4, seed=3)] == [4, 4, 2]


@pytest.mark.parametrize(("num_seqs", "minibatch_seqs"), [(4, 0), (0, 4)])
def test_minibatches_of_nothing_are_refused(num_seqs, minibatch_seqs):
    with pytest.raises(ValueError, match="do not divide"):
        minibatch_rows(num_seqs, minibatch_seqs, seed=0)
