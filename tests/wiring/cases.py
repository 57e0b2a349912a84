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


def each_key(names: str, cases: list[tuple[str, ...]] | list[tuple[str, object]]) -> Callable[[Test], Test]:
    """Parametrize a test by cases whose first entry is the key that they cover."""

    def note(test: Test) -> Test:
        marked: Test = pytest.mark.parametrize(names, cases, ids=[f"{case[0]}={case[-1]}" for case in cases])(test)
        return holds(*(str(case[0]) for case in cases))(marked)

    return note
