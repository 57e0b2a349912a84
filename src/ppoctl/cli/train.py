"""`ppoctl train` and `ppoctl rollout`: start a run from a recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import render, summary
from ppoctl.cli.long_command import engine_ahead, working
from ppoctl.cli.options import (
    Chain,
    Force,
    JsonOption,
    On,
    Quiet,
    Recipes,
    Runs,
    Sets,
    TestOnly,
    Verbose,
    Without,
    with_accepted,
)
from ppoctl.cli.submission import Submission
from ppoctl.core.activity import loading
from ppoctl.core.errors import as_typed

if TYPE_CHECKING:
    from ppoctl.recipe.loading.load import Loaded


def train(
    files: Recipes,
    sets: Sets = None,
    without: Without = None,
    runs: Runs = summary.RUNS,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue the run if it exists. Meant for batch scripts.")
    ] = False,
    on: On = "here",
    test_only: TestOnly = False,
    chain: Chain = 1,
    force: Force = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: JsonOption = False,
) -> None:
    """Train a model: create the run RUNS/NAME and run its steps. NAME is the `name` key of the recipe. If the run
    already exists, the command fails; use `ppoctl resume` to continue the run."""
    sets = with_accepted(sets, without)
    if on == "slurm":
        submission = Submission(test_only=test_only, chain=chain, as_json=json, force=force)
        submission.new_run(files, sets, runs, "train", or_resume=or_resume)
        return
    with working(as_typed("train", files, sets), verbose=verbose, quiet=quiet) as (screen, gate):
        loaded = _startable(files, sets, runs, force=force)
        _require_way(runs / loaded.recipe.name, or_resume=or_resume)
        with engine_ahead(loaded.recipe):
            with loading("libraries"):
                from ppoctl.run import run_commands

            ended = run_commands.train(loaded, gate, runs=runs, or_resume=or_resume, screen=screen)
    summary.print_summary(ended, as_json=json)


def rollout(
    files: Recipes,
    sets: Sets = None,
    without: Without = None,
    runs: Runs = summary.RUNS,
    on: On = "here",
    test_only: TestOnly = False,
    force: Force = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: JsonOption = False,
) -> None:
    """Generate and score the responses of the first step, and stop. `train` with the same recipe continues from these
    responses."""
    sets = with_accepted(sets, without)
    if on == "slurm":
        submission = Submission(test_only=test_only, chain=1, as_json=json, force=force)
        submission.new_run(files, sets, runs, "rollout")
        return
    with working(as_typed("rollout", files, sets), verbose=verbose, quiet=quiet) as (screen, gate):
        loaded = _startable(files, sets, runs, force=force)
        _require_way(runs / loaded.recipe.name, or_resume=True)
        with engine_ahead(loaded.recipe):
            with loading("libraries"):
                from ppoctl.run import run_commands

            ended = run_commands.rollout(loaded, gate, runs=runs, screen=screen)
    summary.print_rollout(ended, as_json=json)


def _startable(files: Sequence[Path], sets: Sequence[str], runs: Path, *, force: bool) -> "Loaded":
    from ppoctl.run.startable import startable

    return startable(files, sets, runs, render.messages(), force=force)


def _require_way(run: Path, *, or_resume: bool) -> None:
    """Check before libraries are loaded, which takes long, that the command can begin or continue the run."""
    from ppoctl.run.new_run import require_way
    from ppoctl.store.run_paths import RunPaths

    require_way(RunPaths(run), or_resume=or_resume)
