"""`ppoctl compare`: how far two runs drew the same samples."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import Json, Run


def compare(
    run: Run,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another run directory.")],
    json: Json = False,
) -> None:
    """Compare two runs sample by sample, in the order of their ledgers, up to the first difference."""
    from ppoctl.store import run_dir
    from ppoctl.store.compare import compare as side_by_side
    from ppoctl.store.layout import RunLayout

    layouts = [RunLayout(folder) for folder in (run, other)]
    for layout in layouts:
        run_dir.facts(layout)
    found = side_by_side(layouts[0].ledger, layouts[1].ledger)
    if json:
        render.json(asdict(found))
        return
    render.line(f"equal samples: {found.equal_samples} of {found.samples[0]} and {found.samples[1]}")
    render.line(f"equal steps: {found.last_equal_step}")
    for folder, steps in zip((run, other), found.lost_steps, strict=True):
        if steps:
            render.line(f"stepped over, lost from the ledger of {folder}: {', '.join(map(str, steps))}")
    if found.first is None:
        render.line("no difference")
        return
    first = found.first
    render.line(f"first difference: step {first.step}, prompt {first.prompt}, sample {first.sample}")
    render.table([(name, *map(str, values)) for name, values in first.what.items()], ("", str(run), str(other)))
