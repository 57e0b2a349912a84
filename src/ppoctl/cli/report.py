"""`ppoctl report`: write one HTML file of a run, or a comparison of several runs."""

from pathlib import Path
from typing import Annotated

import typer

from ppoctl import units
from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, SeveralRuns


def report(
    runs: SeveralRuns,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="HTML file. Default: NAME.html in this folder.")
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=0, metavar="COUNT", help="Include samples of COUNT steps per run; 0: no samples."
        ),
    ] = 3,
    json: JsonOption = False,
) -> None:
    """Write one HTML file of a run, or of several runs compared. It contains curves, time use, samples with their
    tokens, the recipe and the attempts, and requires no network. Only an earlier report is overwritten."""
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
