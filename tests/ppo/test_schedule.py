"""The learning rate of each optimizer step, and the rows of each minibatch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppoctl.ppo.learning_rate import learning_rate
from ppoctl.ppo.minibatches import minibatch_rows
from tolerance import EXACT, FLOAT32


def rates(kind, *, warmup_updates=2, total_updates=6, min_frac=0.2, num_updates=8):
    return torch.tensor(
        [
            learning_rate(
                update,
                peak=1.0,
                warmup_updates=warmup_updates,
                total_updates=total_updates,
                kind=kind,
                min_frac=min_frac,
            )
            for update in range(num_updates)
        ]
    )


def test_linear_by_hand():
    # warm-up 1/2, 1; then 4 updates down to 0.2: minus 0.8 / 4 each; the floor from update 6 on
    FLOAT32.check(rates("linear"), torch.tensor([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]))


def test_cosine_by_hand():
    # 0.2 + 0.8 (1 + cos(pi p)) / 2 with p = 0, 1/4, 1/2, 3/4, 1, and cos(pi / 4) = 0.7071068
    expected = [0.5, 1.0, 1.0, 0.6 + 0.4 * 0.7071068, 0.6, 0.6 - 0.4 * 0.7071068, 0.2, 0.2]
    FLOAT32.check(rates("cosine"), torch.tensor(expected))


def test_constant_stays_at_its_peak_after_the_warm_up():
    expected = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0])
    FLOAT32.check(rates("constant", warmup_updates=4), expected)


@settings(deadline=None)
@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_updates=st.integers(0, 20),
    total_updates=st.integers(1, 50),
    min_frac=st.floats(0, 1),
)
def test_the_first_update_moves_none_exceeds_the_peak_and_after_the_warm_up_none_rises(
    kind, warmup_updates, total_updates, min_frac
):
    found = rates(kind, warmup_updates=warmup_updates, total_updates=total_updates, min_frac=min_frac, num_updates=60)
    assert found[0] > 0
    assert found.max() <= 1
    assert (found[warmup_updates:].diff() <= 0).all()
    assert (found[:warmup_updates].diff() > 0).all()


def test_the_rate_is_a_share_of_the_peak():
    rate = learning_rate(3, peak=8.0, warmup_updates=2, total_updates=6, kind="linear", min_frac=0.2)
    FLOAT32.check(rate, 6.4)


@pytest.mark.parametrize(
    ("update", "warmup_updates", "min_frac", "message"),
    [(-1, 0, 0.0, "update is -1"), (0, -1, 0.0, "warmup_updates is -1"), (0, 0, 1.5, "min_frac is 1.5")],
)
def test_impossible_schedules_are_refused(update, warmup_updates, min_frac, message):
    with pytest.raises(ValueError, match=message):
        learning_rate(
            update, peak=1.0, warmup_updates=warmup_updates, total_updates=5, kind="linear", min_frac=min_frac
        )


def test_minibatches_hold_every_row_once_in_equal_parts():
    parts = minibatch_rows(12, 4, seed=0)
    assert [part.shape for part in parts] == [(4,)] * 3
    EXACT.check(torch.cat(parts).sort().values, torch.arange(12))
    assert not torch.equal(torch.cat(parts), torch.arange(12))


def test_the_seed_alone_decides_the_order():
    torch.manual_seed(1)
    first = torch.cat(minibatch_rows(64, 8, seed=5))
    torch.manual_seed(2)
    EXACT.check(torch.cat(minibatch_rows(64, 8, seed=5)), first)
    assert not torch.equal(torch.cat(minibatch_rows(64, 8, seed=6)), first)


def test_the_global_generator_is_not_moved():
    before = torch.random.get_rng_state()
    minibatch_rows(8, 2, seed=5)
    EXACT.check(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("num_seqs", "minibatch_seqs"), [(10, 4), (4, 8), (4, 0), (0, 4)])
def test_minibatches_that_do_not_divide_are_refused(num_seqs, minibatch_seqs):
    with pytest.raises(ValueError, match="do not divide"):
        minibatch_rows(num_seqs, minibatch_seqs, seed=0)
