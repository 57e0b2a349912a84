"""`ppoctl doctor`: whether this machine can run, before anything is started."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, Runs, Sets
from ppoctl.errors import EnvironmentProblemError

if TYPE_CHECKING:
    from ppoctl.doctor.finding import Finding
    from ppoctl.doctor.recipe_checks import IntendedRun


def doctor(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="RECIPE", help="TOML files: also look at what they need.")
    ] = None,
    sets: Sets = None,
    runs: Runs = Path("runs"),
    json: JsonOption = False,
) -> int | None:
    """Find out whether this machine can run. Driver, packages, GPUs, limits and disks, a line each: what is wrong,
    and the command that mends it. Changes nothing. Exit code 3 where something is wrong."""
    from ppoctl.doctor.examine import findings
    from ppoctl.machine.host_info import this_machine

    wanted = _asked(files, sets or ()) if files else None
    try:
        found = list(findings(this_machine(), runs, wanted, render.passing))
    finally:
        render.passing()
    return print_findings(found, json=json)


def print_findings(found: "Sequence[Finding]", *, json: bool) -> int | None:
    """Print all findings; the exit code where one is wrong."""
    bad = [finding for finding in found if finding.verdict == "wrong"]
    error = None
    if bad:
        error = EnvironmentProblemError(
            "\n".join(f"{finding.name}: {finding.seen}" for finding in bad), hint=bad[0].mend
        )
    if json:
        render.json({"ok": error is None, "findings": [finding.as_json() for finding in found]})
        if error is not None:
            render.json({"error": error.as_json()})
    else:
        render.table([(finding.name, finding.verdict.value, _line(finding)) for finding in found])
        count = "nothing is wrong" if not bad else f"{len(bad)} of {len(found)} findings are wrong"
        render.print_stderr(count)
    return None if error is None else int(error.exit_code)


def _line(finding: "Finding") -> str:
    return finding.seen if finding.mend is None else f"{finding.seen}; mend it: {finding.mend}"


def _asked(files: Sequence[Path], sets: Sequence[str]) -> "IntendedRun":
    """The recipe with what it names and is not here. Raises RecipeError where it is wrong by itself."""
    from ppoctl.doctor.recipe_checks import IntendedRun
    from ppoctl.loading.load import examine
    from ppoctl.loading.problems import as_error

    loaded, problems = examine(files, sets)
    if loaded is None:
        raise as_error([problem for problem in problems if not problem.is_missing])
    return IntendedRun(loaded.recipe, tuple(problems))
