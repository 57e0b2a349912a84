"""`ppoctl doctor`: whether this machine can run ppoctl, checked before anything starts."""

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
        list[Path] | None, typer.Argument(metavar="RECIPE", help="TOML files: also check what these recipes require.")
    ] = None,
    sets: Sets = None,
    runs: Runs = Path("runs"),
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also print the checks that passed.")] = False,
    json: JsonOption = False,
) -> int | None:
    """Check whether this machine can run ppoctl. Checks driver, packages, GPUs, limits and disks. Prints each
    problem with the command that fixes it, and the number of checks that passed. Changes nothing. Exits with code 3
    if a check fails."""
    from ppoctl.doctor.examine import findings
    from ppoctl.machine.host_info import this_machine

    intended = _intended(files, sets or ()) if files else None
    try:
        found = list(findings(this_machine(), runs, intended, render.passing))
    finally:
        render.passing()
    return print_findings(found, verbose=verbose, json=json)


def print_findings(found: "Sequence[Finding]", *, verbose: bool, json: bool) -> int | None:
    """Print the findings that are not ok (`verbose`: all findings), and their counts.

    Returns an exit code if a finding is wrong, otherwise None.
    """
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
        shown = [finding for finding in found if verbose or finding.verdict != "ok"]
        render.table([(finding.name, finding.verdict.value, _line(finding)) for finding in shown])
        render.line(_count(found))
    return None if error is None else int(error.exit_code)


def _line(finding: "Finding") -> str:
    return finding.seen if finding.mend is None else f"{finding.seen}; fix: {finding.mend}"


def _count(found: "Sequence[Finding]") -> str:
    """For example `20 checks passed, 1 warning, 1 failed`."""
    numbers = {word: sum(finding.verdict == word for finding in found) for word in ("ok", "warning", "wrong")}
    passed = f"{numbers['ok']} checks passed" if numbers["ok"] != 1 else "1 check passed"
    warnings = f", {numbers['warning']} warning{'s' if numbers['warning'] > 1 else ''}" if numbers["warning"] else ""
    return passed + warnings + (f", {numbers['wrong']} failed" if numbers["wrong"] else "")


def _intended(files: Sequence[Path], sets: Sequence[str]) -> "IntendedRun":
    """Return the recipe, and the files that the recipe names but this machine lacks.

    Raises RecipeError if the recipe itself is wrong.
    """
    from ppoctl.doctor.recipe_checks import IntendedRun
    from ppoctl.loading.load import examine
    from ppoctl.loading.problems import as_error

    loaded, problems = examine(files, sets)
    if loaded is None:
        raise as_error([problem for problem in problems if not problem.is_missing])
    return IntendedRun(loaded.recipe, tuple(problems))
