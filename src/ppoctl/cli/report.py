"""`ppoctl report`: write one HTML file of a run, or a comparison of several runs."""

from pathlib import Path
from typing import Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, SeveralRuns
from ppoctl.core import units


def report(
    runs: SeveralRuns,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="HTML file to write. Default: NAME.html in the working directory."
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            min=0,
            metavar="COUNT",
            help="Include samples of COUNT steps of each run; 0 includes no samples.",
        ),
    ] = 3,
    json: JsonOption = False,
) -> None:
    """Write an HTML report of one run, or a comparison of several runs. The file contains curves, time use, samples
    with their tokens, the recipe and the attempts, and requires no network. An existing file is overwritten only if
    it is a report."""
    from ppoctl.show.report.report_file import write_report

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
