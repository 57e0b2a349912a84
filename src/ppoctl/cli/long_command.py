"""Contexts shared by long commands: a screen that shows progress, and a gate that signals close."""

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
    """Context in which the engine of the recipe starts, in parallel with loading libraries and reading data."""
    from ppoctl.wire import prestart

    return prestart.prestarted_engine(recipe)


@contextmanager
def screen(*, verbose: bool = False, quiet: bool = False) -> "Iterator[Screen]":
    """Context of a screen on stderr. It shows messages of `render`, but not the output of libraries."""
    from ppoctl.tracking.library_output import LIBRARY_OUTPUT
    from ppoctl.tracking.screen import open_screen

    with (
        LIBRARY_OUTPUT.kept_apart() as stream,
        open_screen("quiet" if quiet else "stages" if verbose else "steps", stream) as opened,
        render.talking_through(opened.line),
    ):
        yield opened


@contextmanager
def working(
    resume_command: str, *, verbose: bool = False, quiet: bool = False
) -> "Iterator[tuple[Screen, SignalGate]]":
    """Context of work that a signal can stop: a screen, and a gate that prints to it.

    `resume_command` is what a user types to continue later.
    """
    from ppoctl.shutdown.signals import signal_gate

    with screen(verbose=verbose, quiet=quiet) as opened, signal_gate(resume_command, opened.line) as gate:
        yield opened, gate
