"""`ppoctl train` and `ppoctl rollout`: start the run of a recipe."""

from typing import Annotated

import typer

from ppoctl.cli import preflight, summary
from ppoctl.cli.options import Force, Json, Recipes, Runs, Sets, Verbose, as_typed


def train(
    files: Recipes,
    sets: Sets = None,
    runs: Runs = summary.RUNS,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue the run if it exists (batch scripts use this).")
    ] = False,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Train: create the run RUNS/NAME and do it. An existing one is refused; `resume` continues it."""
    from ppoctl.launch.signals import signal_gate

    with signal_gate(as_typed("train", files, sets or ())) as gate:
        loaded = preflight.startable(files, sets or (), runs, force=force)
        from ppoctl.wire import commands

        ended = commands.train(loaded, gate, runs=runs, or_resume=or_resume, verbose=verbose)
    summary.print_summary(ended, as_json=json)


def rollout(
    files: Recipes,
    sets: Sets = None,
    runs: Runs = summary.RUNS,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Draw and score the responses of the first step, and stop. `train` with the same recipe goes on from them."""
    from ppoctl.launch.signals import signal_gate

    with signal_gate(as_typed("rollout", files, sets or ())) as gate:
        loaded = preflight.startable(files, sets or (), runs, force=force)
        from ppoctl.wire import commands

        ended = commands.rollout(loaded, gate, runs=runs, verbose=verbose)
    summary.print_rollout(ended, as_json=json)
