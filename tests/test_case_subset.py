"""The random subset of slow tests in CI: every cell has a chance, and no selection takes too long."""

from collections import Counter

import pytest

from case_subset import Cell, draw, sampled

SHORT = [Cell(f"layouts[{number}]") for number in range(27)]
LONG = [Cell("any kill", 4.0), Cell("layouts[15] of a run", 5.0), Cell("zero left", 2.0)]
GRID = [Cell(f"grid[{number}]", 1.5, grid="grid") for number in range(8)]
ALONE = Cell("quickstart", 6.0, grid="quickstart")
CELLS = [*SHORT, *GRID, *LONG, ALONE]
DRAWS = [draw(CELLS, f"commit {number}", 8) for number in range(2000)]


def test_selection_depends_only_on_seed_and_not_on_test_order() -> None:
    assert draw(CELLS, "a", 8) == draw(CELLS[::-1], "a", 8)
    assert len({frozenset(selected) for selected in DRAWS}) > 1000


def test_every_case_is_selected_with_at_least_the_given_chance() -> None:
    times = Counter(name for selected in DRAWS for name in selected)
    assert all(times[cell.name] / 2000 >= 1 / 8 - 0.03 for cell in CELLS)
    assert times["quickstart"] == 2000


def test_one_grid_case_is_selected_each_time() -> None:
    assert all(sum(name.startswith("grid[") for name in selected) == 1 for selected in DRAWS)


def test_selected_cases_stay_within_the_time_limit() -> None:
    minutes = {cell.name: cell.minutes for cell in CELLS}
    # Long cells: 11 minutes in one block with five short ones. Selected: at most 5 of them, 1.5 of the grid, 6.
    assert max(sum(minutes[name] for name in selected) for selected in DRAWS) == 5.0 + 1.5 + 6.0


def test_new_case_changes_only_the_selection_of_its_block() -> None:
    more = [*CELLS, Cell("zzz")]  # into the last block
    assert draw(more, "a", 8) - {"zzz"} <= draw(CELLS, "a", 8) | {f"layouts[{n}]" for n in range(27)}
    assert {n for n in draw(more, "a", 8) if "grid" in n} == {n for n in draw(CELLS, "a", 8) if "grid" in n}


@pytest.mark.parametrize("one_in", [1, 3])
def test_number_of_selected_cases_follows_the_fraction(one_in: int) -> None:
    selected = draw([*SHORT, *LONG], "a", one_in)
    assert len(selected) == 30 / one_in


def test_sampled_cases_are_spread_over_the_grid_and_include_the_pinned_ones() -> None:
    found = {name: sampled(name, 40, 8) for name in ("a", "b", "c")}
    for kept in found.values():
        assert [sum(first <= number < first + 10 for number in kept) for first in range(0, 40, 10)] == [2] * 4
    assert len({frozenset(kept) for kept in found.values()}) > 1
    assert sampled("a", 40, 8, [3, 39]) == found["a"] | {3, 39}
    assert sampled("a", 3, 8) == {0, 1, 2}
    assert sampled("a", 40, 8) == found["a"]
