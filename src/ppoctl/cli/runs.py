"""`ppoctl runs`: list the runs of a folder, one row per run."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ppoctl.cli import render
from ppoctl.cli.listing import BROKEN, Listed, listed
from ppoctl.cli.options import JsonOption, Wait, run_folders
from ppoctl.cli.summary import RUNS
from ppoctl.core import units
from ppoctl.core.errors import RecipeError, quoted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

By = Literal["name", "age", "reward", "eval", "size"]

_ORDER: dict[By, Callable[[Listed], Any]] = {
    "age": lambda row: -row.written_at,
    "reward": lambda row: _downwards(row.reward),
    "eval": lambda row: _downwards(next(iter(row.evaluation.values()), None)),
    "size": lambda row: -row.bytes,
    "name": lambda row: str(row.run),
}


def runs(
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="Folder of run directories.")] = None,
    sort: Annotated[
        By,
        typer.Option(
            "--sort",
            metavar="ORDER",
            help="Sort by name, age, reward, eval or size. Newest, best or largest runs come first.",
        ),
    ] = "age",
    state: Annotated[
        str | None,
        typer.Option("--state", metavar="WORD,...", help="Only runs in these states, e.g. running,killed."),
    ] = None,
    named: Annotated[
        Path | None,
        typer.Option("--runs", metavar="FOLDER", help="Folder of run directories. Use either --runs or FOLDER."),
    ] = None,
    wait: Wait = None,
    json: JsonOption = False,
) -> None:
    """List your runs, one row per run. Columns: state, steps, last reward and evaluation, size, age, and where the
    run is running. States are those of `ppoctl status`, or `broken` for a run that cannot be read. Each evaluation
    set shows its pass@1, or its mean score if it has no pass@1."""
    if folder is not None and named is not None:
        message = f"`{folder}` and `--runs {named}` both name the folder of run directories"
        raise RecipeError(message, hint=f"ppoctl runs {quoted(folder)}")
    folder = folder or named or RUNS
    wanted = _states(state)
    found = _found(folder)
    rows, slurm_error = listed(found, wait)
    rows = sorted((row for row in rows if not wanted or row.state in wanted), key=_ORDER[sort])
    if json:
        shown = [{**row.as_json(), "age_s": _age_s(row)} for row in rows]
        render.json({"folder": str(folder), "runs": shown, "slurm_silent": slurm_error})
        return
    if rows:
        _print(folder, rows)
    elif found:
        render.print_stderr(f"none of {len(found)} runs in `{folder}` is {' or '.join(sorted(wanted))}")
    else:
        render.print_stderr(f"there are no runs in `{folder}`")
    if slurm_error is not None:
        render.print_stderr(
            f"note: Slurm did not answer about the jobs: {slurm_error}; "
            f"try again: ppoctl runs {quoted(folder)} --wait 20"
        )


def _print(folder: Path, rows: "Sequence[Listed]") -> None:
    from ppoctl.core.clock import duration

    cells = []
    for row in rows:
        reward = "-" if row.reward is None else f"{row.reward:.4g}"
        name = str(row.run.relative_to(folder))
        size, age = units.size(row.bytes), duration(_age_s(row))
        cells.append((name, row.state, row.steps, reward, row.evaluated, size, age, row.where))
    render.table(cells, ("run", "state", "steps", "reward", "evaluation", "size", "age", "where"))
    for row in rows:
        if row.state == BROKEN:
            render.print_stderr(f"note: {render.printable(row.says)}")


def _found(folder: Path) -> list[Path]:
    if (folder / "run.json").is_file():
        raise RecipeError(f"`{folder}` is a run itself", hint=f"ppoctl status {quoted(folder)}")
    if not folder.is_dir():
        hint = "ppoctl recipes list  # then train one of them" if folder == RUNS else "ppoctl runs"
        raise RecipeError(f"there is no folder `{folder}`", hint=hint)
    return run_folders(folder)


def _states(typed: str | None) -> "Collection[str]":
    from ppoctl.start.slurm.run_state import WORDS

    wanted = {word.strip() for word in (typed or "").split(",")} - {""}
    if unknown := sorted(wanted - {*WORDS, BROKEN}):
        known = ", ".join(sorted({*WORDS, BROKEN}))
        raise RecipeError(
            f"`--state {unknown[0]}` is not a state; states: {known}", hint="ppoctl runs --state running,pending"
        )
    return wanted


def _downwards(value: float | None) -> tuple[bool, float]:
    """Return a sort key for descending order, with None and nan last."""
    return (value is None or value != value, -(value or 0.0))  # nan is not equal to itself


def _age_s(row: Listed) -> float:
    return max(time.time() - row.written_at, 0.0)
