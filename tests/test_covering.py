"""Few cases that cover every pair of features."""

from itertools import product

from covering import covering, pairs_of

GRID = [*product((1, 2), (1, 2, 3), "ab", "xy")]
IMPOSSIBLE = (2, 3)
CASES = [case for case in GRID if case[:2] != IMPOSSIBLE]


def features(case: tuple[object, ...]) -> dict[str, object]:
    return dict(zip(("tensor", "pipeline", "role", "recompute"), case, strict=True))


def test_every_pair_of_the_grid_is_in_a_chosen_case() -> None:
    chosen = covering(CASES, features)
    possible = set().union(*(pairs_of(features(case)) for case in CASES))
    assert (("pipeline", 3), ("tensor", 2)) not in possible
    assert len(possible) == 5 + 4 + 4 + 6 + 6 + 4
    assert set().union(*(pairs_of(features(case)) for case in chosen)) == possible
    # Three values of one feature and two of another need six cases.
    assert 6 <= len(chosen) <= 8
    assert set(chosen) <= set(CASES)


def test_pinned_cases_come_first_and_count() -> None:
    pinned = CASES[-2:]
    chosen = covering(CASES, features, pinned)
    assert chosen[:2] == pinned
    assert len(set(chosen)) == len(chosen) <= 9
