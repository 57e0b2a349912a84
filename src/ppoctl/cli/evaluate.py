"""`ppoctl eval`: how good a checkpoint is, on the recipe's evaluation sets."""

from pathlib import Path
from typing import Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import Json, Sets
from ppoctl.errors import StorageError, quoted


def evaluate(
    ckpt: Annotated[
        Path,
        typer.Option("--ckpt", help="A run, one of its states/actor/N folders, or a model folder (with RECIPE)."),
    ],
    files: Annotated[list[Path] | None, typer.Argument(metavar="[RECIPE]...", help="Default: the run's own.")] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write every sample to this JSONL file.")] = None,
    json: Json = False,
) -> None:
    """Greedy and sampled pass@1 with standard error, the same way `train` evaluates."""
    if out is not None and out.exists():
        raise StorageError(f"`{out}` exists", hint="name another file with --out")
    if out is not None and not out.parent.is_dir():
        raise StorageError(f"`{out.parent}` is no folder", hint=f"mkdir -p {quoted(out.parent)}")
    from ppoctl.wire import commands

    checkpoint = commands.find_checkpoint(ckpt, files or (), sets or ())
    evaluation = commands.evaluate(checkpoint, render.say)
    if out is not None:
        try:
            out.write_bytes(evaluation.readable_files()["samples.jsonl"])
        except OSError as error:
            look = f"ls -ld {quoted(out.parent)}"
            raise StorageError(f"cannot write `{out}`: {error.strerror}", hint=look) from error
    if json:
        render.json({"checkpoint": str(ckpt), "state": evaluation.stamp, "figures": evaluation.figures()})
        return
    rows = [(name, f"{value:.4g}") for name, value in evaluation.figures().items()]
    render.table(rows, ("figure", "value"))
    render.line()
    render.line(f"state: {evaluation.stamp}")
    if out is not None:
        render.line(f"samples: {out}")
