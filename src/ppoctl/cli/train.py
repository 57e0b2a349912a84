"""`ppoctl train` and `ppoctl rollout`: start the run of a recipe."""

from typing import Annotated

import typer

from ppoctl.cli import preflight, summary
from ppoctl.cli.options import Chain, Force, Json, On, Recipes, Runs, Sets, TestOnly, Verbose
from ppoctl.cli.submission import Submission


def train(
    files: Recipes,
    sets: Sets = None,
    runs: Runs = summary.RUNS,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue the run if it exists (batch scripts use this).")
    ] = False,
    on: On = "here",
    test_only: TestOnly = False,
    chain: Chain = 1,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Train: create the run RUNS/NAME and do it. An existing one is refused; `resume` continues it."""
    if on == "slurm":
        submission = Submission(test_only=test_only, chain=chain, as_json=json, force=force)
        submission.new_run(files, sets or (), runs, "train", or_resume=or_resume)
        return
    loaded = preflight.startable(files, sets or (), runs, force=force)
    from ppoctl.wire import commands

    summary.print_summary(commands.train(loaded, runs=runs, or_resume=or_resume, verbose=verbose), as_json=json)


def rollout(
    files: Recipes,
    sets: Sets = None,
    runs: Runs = summary.RUNS,
    on: On = "here",
    test_only: TestOnly = False,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Draw and score the responses of the first step, and stop. `train` with the same recipe goes on from them."""
    if on == "slurm":
        submission = Submission(test_only=test_only, chain=1, as_json=json, force=force)
        submission.new_run(files, sets or (), runs, "rollout", or_resume=False)
        return
    loaded = preflight.startable(files, sets or (), runs, force=force)
    from ppoctl.wire import commands

    ended = commands.rollout(loaded, runs=runs, verbose=verbose)
    summary.print_rollout(ended, as_json=json)
