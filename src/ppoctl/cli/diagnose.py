"""`ppoctl diagnose`: why a run does not learn."""

from typing import TYPE_CHECKING, Any

from ppoctl.cli import render
from ppoctl.cli.findings import print_causes
from ppoctl.cli.options import JsonOption, RunArgument, open_run
from ppoctl.core.errors import ExitCode, RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.core.finding import Finding
    from ppoctl.show.diagnose.evidence import Evidence


def diagnose(run: RunArgument, json: JsonOption = False) -> int | None:
    """Find out why a run does not learn. Prints the most likely cause first: since which step, a sample that shows
    it, and the key to change. Exits with code 5 if the run has failed to learn, with 0 if it is healthy or has only
    warnings."""
    from ppoctl.show.diagnose import causes
    from ppoctl.show.diagnose.evidence import evidence

    curves = causes.read(run)
    if not curves.series:
        raise RecipeError(f"run `{run}` has no metrics yet", hint=f"ppoctl status {quoted(run)}")
    symptoms, recorded = causes.examine(curves), open_run(run)
    found: list[tuple[Finding, Evidence | None]] = [(each.finding, evidence(recorded, each)) for each in symptoms]
    found += [(each, None) for each in causes.summary(curves, symptoms)]
    is_failed = any(finding.is_error for finding, _ in found)
    if json:
        render.json({"ok": not is_failed, "findings": [_as_json(*pair) for pair in found]})
    else:
        print_causes((finding, _shown(sample)) for finding, sample in found)
    return int(ExitCode.HEALTH) if is_failed else None


def _as_json(finding: "Finding", sample: "Evidence | None") -> dict[str, Any]:
    return {**finding.as_json(), "sample": None if sample is None else vars(sample)}


def _shown(sample: "Evidence | None") -> str | None:
    return None if sample is None else f"{sample.command}  (prompt {sample.prompt})"
