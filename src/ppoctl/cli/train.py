"""`ppoctl train`: do a recipe."""

from typing import Annotated

import typer

from ppoctl.cli import ending, preflight
from ppoctl.cli.options import Force, Json, Recipes, Runs, Sets, Verbose


def train(
    files: Recipes,
    sets: Sets = None,
    runs: Runs = ending.RUNS,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue the run if it exists (batch scripts use this).")
    ] = False,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Train: create the run RUNS/NAME and do it. An existing one is refused; `resume` continues it."""
    loaded = preflight.startable(files, sets or (), runs, force=force)
    from ppoctl.wire import commands

    ending.tell(commands.train(loaded, runs=runs, or_resume=or_resume, verbose=verbose), as_json=json)


def rollout(
    files: Recipes,
    sets: Sets = None,
    runs: Runs = ending.RUNS,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Draw and score the responses of the first step, and stop. `train` with the same recipe goes on from them."""
    loaded = preflight.startable(files, sets or (), runs, force=force)
    from ppoctl.wire import commands

    ended = commands.rollout(loaded, runs=runs, verbose=verbose)
    ending.tell_rollout(ended, as_json=json)
