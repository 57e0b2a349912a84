"""Contexts for long commands: a screen that shows progress, and a gate that stops the work after a signal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ppoctl.cli import render

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ppoctl.recipe.schema import Recipe
    from ppoctl.run.shutdown.signals import SignalGate
    from ppoctl.show.tracking.screen import Screen


def engine_ahead(recipe: "Recipe") -> "AbstractContextManager[None]":
    """Return a context in which the vLLM engine starts while libraries are loaded and data is read."""
    from ppoctl.run.wire import prestart

    return prestart.prestarted_engines(recipe)


@contextmanager
def screen(*, verbose: bool = False, quiet: bool = False) -> "Iterator[Screen]":
    """Open a screen on stderr. The screen shows messages of `render`, but not the output of libraries."""
    from ppoctl.show.tracking.library_output import LIBRARY_OUTPUT
    from ppoctl.show.tracking.screen import open_screen

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
    """Open a screen, and a gate that stops the work after a signal and prints its messages on the screen.

    `resume_command` is the command that a user types to continue later.
    """
    from ppoctl.run.shutdown.signals import signal_gate

    with screen(verbose=verbose, quiet=quiet) as opened, signal_gate(resume_command, opened.line) as gate:
        yield opened, gate
