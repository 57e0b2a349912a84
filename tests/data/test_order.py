"""The order of rows from several sources."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.data.order import Order, SourceShare


def epochs(order: Order, count: int) -> list[list[int]]:
    rows = order.epoch_rows
    return [[order.row(position) for position in range(n * rows, (n + 1) * rows)] for n in range(count)]


def test_fraction_of_a_source_continues_across_epochs() -> None:
    order = Order((SourceShare(3), SourceShare(10, 0.3)), seed=1)
    assert order.epoch_rows == 6
    by_epoch = epochs(order, 10)
    assert all(sorted(rows)[:3] == [0, 1, 2] for rows in by_epoch)
    # Ten epochs of three rows are three rounds of ten rows.
    assert Counter(row for rows in by_epoch for row in rows if row >= 3) == dict.fromkeys(range(3, 13), 3)
    assert len({frozenset(rows) for rows in by_epoch}) > 3


def test_sources_of_equal_size_have_different_orders() -> None:
    order = Order((SourceShare(10, 0.3), SourceShare(10, 0.3)), seed=1)
    same_order = [
        {row for row in epoch if row < 10} == {row - 10 for row in epoch if row >= 10} for epoch in epochs(order, 8)
    ]
    assert sum(same_order) < 3


@given(
    shares=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.7])), min_size=1, max_size=3
    ),
    seed=st.integers(0, 5),
)
def test_every_row_occurs_as_often_as_its_weight_up_to_one(shares: list[tuple[int, float]], seed: int) -> None:
    order = Order(tuple(SourceShare(rows, weight) for rows, weight in shares), seed)
    if not order.epoch_rows:
        return
    for rows in epochs(order, 3):
        times, start = Counter(rows), 0
        for count, weight in shares:
            mine = [times[row] for row in range(start, start + count)]
            assert sum(mine) == round(count * weight)
            assert all(int(weight) <= count <= int(weight) + 2 for count in mine)
            start += count


@pytest.mark.parametrize("seed", [0, 7])
def test_single_source_mix_has_the_order_of_a_plain_set(seed: int) -> None:
    assert epochs(Order((SourceShare(12, 1.0),), seed), 3) == epochs(Order((SourceShare(12),), seed), 3)
