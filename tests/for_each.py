"""A convention over many items as one test that names all violations: a test for each item would cost too much
time."""

from collections.abc import Callable, Iterable
from typing import Any


def for_each(things: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Decorate a test: `@for_each(modules)` above `def test_is_short(module)`. A tuple is passed as several
    arguments; the first names the item."""
    listed = [thing if isinstance(thing, tuple) else (thing,) for thing in things]

    def tested(law: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for thing in listed:
                try:
                    law(*thing)
                except AssertionError as error:
                    broken.append(f"{thing[0]}: {error}")
                except Exception as error:
                    error.add_note(f"of {thing[0]}")
                    raise
            assert listed, "there is nothing to look at"
            assert not broken, "\n".join(broken)

        test.__name__, test.__doc__ = law.__name__, law.__doc__
        return test

    return tested


def id_in_order(value: object) -> str:
    """Return a test id that is the same in every worker: the order of a set depends on the process."""
    return str(sorted(value)) if isinstance(value, set) else str(value)
