"""Which result keys have a test in this folder. A test marks the keys that it covers; a key without a test fails the
suite."""

from collections.abc import Callable
from typing import TypeVar

import pytest

HELD: dict[str, list[str]] = {}
"""Dotted key -> tests that cover it."""

Test = TypeVar("Test", bound=Callable[..., object])


def holds(*keys: str) -> Callable[[Test], Test]:
    """Mark a test that gives two values of each key and checks that the results differ as they should."""

    def note(test: Test) -> Test:
        for key in keys:
            HELD.setdefault(key, []).append(test.__name__)
        return test

    return note


def each_key(
    names: str, cases: list[tuple[str, ...]] | list[tuple[str, object]], stays: Callable[..., str] = lambda *_: ""
) -> Callable[[Test], Test]:
    """Parametrize a test by cases whose first entry is the key that they cover. `stays` returns what sees the same
    as a case that only CI runs."""

    def note(test: Test) -> Test:
        marks = [[pytest.mark.ci(other)] if (other := stays(*case)) else [] for case in cases]
        params = [
            pytest.param(*case, id=f"{case[0]}={case[-1]}", marks=mark)
            for case, mark in zip(cases, marks, strict=True)
        ]
        marked: Test = pytest.mark.parametrize(names, params)(test)
        return holds(*(str(case[0]) for case in cases))(marked)

    return note
