"""What commands that work for long have in common: a screen that says what they do, and a gate that signals shut."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ppoctl.cli import render

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ppoctl.recipe.schema import Recipe
    from ppoctl.shutdown.signals import SignalGate
    from ppoctl.tracking.screen import Screen


def engine_ahead(recipe: "Recipe") -> "AbstractContextManager[None]":
    """Context in which the engine of the recipe starts, beside libraries that are loaded and data that are read."""
    from ppoctl.wire import prestart

    return prestart.prestarted_engine(recipe)


@contextmanager
def screen(*, verbose: bool = False, quiet: bool = False) -> "Iterator[Screen]":
    """Context of a screen on stderr. What `render` says appears on it; what libraries print does not."""
    from ppoctl.tracking.library_output import LIBRARY_OUTPUT
    from ppoctl.tracking.screen import open_screen

    with (
        LIBRARY_OUTPUT.kept_apart() as stream,
        open_screen("quiet" if quiet else "stages" if verbose else "steps", stream) as opened,
        render.talking_through(opened.line),
    ):
        yield opened


@contextmanager
def working(goes_on: str, *, verbose: bool = False, quiet: bool = False) -> "Iterator[tuple[Screen, SignalGate]]":
    """Context of work that a signal stops: a screen, and the gate that answers on it. `goes_on` is the command that
    goes on later."""
    from ppoctl.shutdown.signals import signal_gate

    with screen(verbose=verbose, quiet=quiet) as opened, signal_gate(goes_on, opened.line) as gate:
        yield opened, gate
