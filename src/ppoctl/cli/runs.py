"""`ppoctl runs`: all runs of a folder, a row each."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ppoctl import units
from ppoctl.cli import render
from ppoctl.cli.listing import BROKEN, Listed, listed
from ppoctl.cli.options import JsonOption, Wait, run_folders
from ppoctl.cli.summary import RUNS
from ppoctl.errors import RecipeError, quoted

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
            "--sort", metavar="ORDER", help="name, age, reward, eval or size; the newest, best or largest first."
        ),
    ] = "age",
    state: Annotated[
        str | None,
        typer.Option("--state", metavar="WORD,...", help="Only runs in these states, e.g. running,killed."),
    ] = None,
    named: Annotated[
        Path | None, typer.Option("--runs", metavar="FOLDER", help="The same as FOLDER, as other commands have it.")
    ] = None,
    wait: Wait = None,
    json: JsonOption = False,
) -> None:
    """List your runs, a row each. State, steps, last reward and evaluation, size, age, and where each is at work.
    States are those of `ppoctl status`, or `broken` for a run that cannot be read; an evaluation set is told by its
    pass@1, else by its mean score."""
    if folder is not None and named is not None:
        says = f"`{folder}` and `--runs {named}` both name the folder of run directories"
        raise RecipeError(says, hint=f"ppoctl runs {quoted(folder)}")
    folder = folder or named or RUNS
    wanted = _states(state)
    found = _found(folder)
    rows, silence = listed(found, wait)
    rows = sorted((row for row in rows if not wanted or row.state in wanted), key=_ORDER[sort])
    if json:
        told = [{**row.as_json(), "age_s": _age_s(row)} for row in rows]
        render.json({"folder": str(folder), "runs": told, "slurm_silent": silence})
        return
    if rows:
        _print(folder, rows)
    elif found:
        render.print_stderr(f"none of {len(found)} runs in `{folder}` is {' or '.join(sorted(wanted))}")
    else:
        render.print_stderr(f"no runs in `{folder}`")
    if silence is not None:
        render.print_stderr(
            f"note: Slurm says nothing of the jobs: {silence}; ask again: ppoctl runs {quoted(folder)} --wait 20"
        )


def _print(folder: Path, rows: "Sequence[Listed]") -> None:
    from ppoctl.clock import duration

    cells = []
    for row in rows:
        reward = "-" if row.reward is None else f"{row.reward:.4g}"
        name = str(row.run.relative_to(folder))
        size, age = units.size(row.bytes), duration(_age_s(row))
        cells.append((name, row.state, row.steps, reward, row.evaluated, size, age, row.where))
    render.table(cells, ("run", "state", "steps", "reward", "evaluation", "size", "age", "at work"))
    for row in rows:
        if row.state == BROKEN:
            render.print_stderr(f"note: {render.printable(row.says)}")


def _found(folder: Path) -> list[Path]:
    if (folder / "run.json").is_file():
        raise RecipeError(f"`{folder}` is a run itself", hint=f"ppoctl status {quoted(folder)}")
    if not folder.is_dir():
        hint = "ppoctl recipes list  # train one of them: ppoctl train RECIPE" if folder == RUNS else "ppoctl runs"
        raise RecipeError(f"there is no folder `{folder}` here, so no runs", hint=hint)
    return run_folders(folder)


def _states(told: str | None) -> "Collection[str]":
    from ppoctl.slurm.run_state import WORDS

    wanted = {word.strip() for word in (told or "").split(",")} - {""}
    if unknown := sorted(wanted - {*WORDS, BROKEN}):
        known = ", ".join(sorted({*WORDS, BROKEN}))
        raise RecipeError(f"`--state {unknown[0]}` is none of {known}", hint="ppoctl runs --state running,pending")
    return wanted


def _downwards(value: float | None) -> tuple[bool, float]:
    """The key of a number of which the largest comes first, and none last."""
    return (value is None or value != value, -(value or 0.0))  # nan is not itself


def _age_s(row: Listed) -> float:
    return max(time.time() - row.written_at, 0.0)
