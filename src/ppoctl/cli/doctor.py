"""`ppoctl doctor`: whether this machine can run ppoctl, checked before anything starts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppoctl.cli import render
from ppoctl.cli.findings import print_findings
from ppoctl.cli.options import JsonOption, Runs, Sets
from ppoctl.core.errors import EnvironmentProblemError, ExitCode

if TYPE_CHECKING:
    from ppoctl.core.finding import Finding


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
    from ppoctl.core.finding import require_none, without_missing
    from ppoctl.core.machine.host_info import this_machine
    from ppoctl.recipe.loading.load import examine
    from ppoctl.start.doctor.examine import findings, of_machine, of_recipe

    loaded, found = examine(files, sets or ()) if files else (None, [])
    if files and loaded is None:
        require_none(without_missing(found))
        require_none(found)
    machine = this_machine()
    checks = of_machine(machine, runs) | ({} if loaded is None else of_recipe(loaded, machine, runs))
    try:
        found += findings(checks, render.passing)
    finally:
        render.passing()
    return report(found, verbose=verbose, json=json)


def report(found: "Sequence[Finding]", *, verbose: bool, json: bool) -> int | None:
    """Print the findings that are not ok (`verbose`: all findings), and their counts.

    Returns an exit code if a finding is an error, otherwise None.
    """
    errors = [finding for finding in found if finding.is_error]
    if json:
        answer: dict[str, Any] = {"ok": not errors, "findings": [finding.as_json() for finding in found]}
        if errors:
            error = EnvironmentProblemError("\n".join(map(str, errors)), hint=errors[0].hint)
            answer["error"] = error.as_json()
        render.json(answer)
    else:
        print_findings(finding for finding in found if verbose or finding.level != "ok")
        render.line(_count(found))
    return int(ExitCode.ENVIRONMENT) if errors else None


def _count(found: "Sequence[Finding]") -> str:
    """For example `20 checks passed, 1 warning, 1 failed`."""
    numbers = Counter(finding.level.value for finding in found)
    passed = f"{numbers['ok']} checks passed" if numbers["ok"] != 1 else "1 check passed"
    warnings = f", {numbers['warning']} warning{'s' if numbers['warning'] > 1 else ''}" if numbers["warning"] else ""
    return passed + warnings + (f", {numbers['error']} failed" if numbers["error"] else "")
