"""Selection of few cases of a grid such that every pair of their features occurs that occurs in any case."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=Hashable)
Features = Callable[[Case], Mapping[str, object]]


def pairs_of(features: Mapping[str, object]) -> set[tuple[tuple[str, object], ...]]:
    """Return all pairs of features of a case."""
    return set(combinations(sorted(features.items(), key=lambda feature: feature[0]), 2))


def covering(cases: Sequence[Case], features: Features[Case], pinned: Collection[Case] = ()) -> list[Case]:
    """Return the pinned cases, and further cases until every pair is covered: each time the first case that covers
    the most pairs that are left."""
    pairs = {case: pairs_of(features(case)) for case in cases}
    chosen = [case for case in cases if case in pinned]
    assert len(chosen) == len(pinned), "a pinned case is not in the grid"
    left = set().union(*pairs.values()) - set().union(*(pairs[case] for case in chosen))
    while left:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & left)))
        left -= pairs[chosen[-1]]
    return chosen
