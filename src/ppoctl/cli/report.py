"""`ppoctl report`: one HTML file of a run, or of several compared, to read in a browser and to pass on."""

from pathlib import Path
from typing import Annotated

import typer

from ppoctl import units
from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, SeveralRuns


def report(
    runs: SeveralRuns,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="HTML file; default: NAME.html here.")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=0, metavar="COUNT", help="Steps of each run with samples; 0: no samples.")
    ] = 3,
    json: JsonOption = False,
) -> None:
    """Write one HTML file of a run, or of several compared. Curves, where the time went, samples with their tokens,
    recipe and attempts. It needs no network; an earlier report is replaced, no other file is."""
    from ppoctl.report.write import write_report

    written = write_report(runs, out, steps=steps)
    if json:
        render.json({**vars(written), "path": str(written.path)})
        return
    rows = [
        ("report", render.printable(str(written.path))),
        ("size", units.size(written.size)),
        ("runs", render.printable(", ".join(written.runs))),
        ("samples", str(written.samples)),
    ]
    render.table([*rows, *(("left out", text) for text in written.left_out)])
