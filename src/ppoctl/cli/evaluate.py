"""`ppoctl eval`: how good a checkpoint is, on the recipe's evaluation sets."""

from pathlib import Path
from typing import Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import Json, Sets
from ppoctl.errors import RecipeError, StorageError, quoted

_OF_A_RUN = ("run.json", "manifest.json")


def evaluate(
    ckpt: Annotated[
        Path,
        typer.Option("--ckpt", help="A run, one of its states/actor/N folders, or a model folder (with RECIPE)."),
    ],
    files: Annotated[list[Path] | None, typer.Argument(metavar="[RECIPE]...", help="Default: the run's own.")] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write every sample to this JSONL file.")] = None,
    json: Json = False,
) -> int | None:
    """Measure a checkpoint: greedy and sampled pass@1 with standard error, the same way `train` evaluates."""
    from ppoctl.preflight.folders import require_new

    if out is not None:
        require_new(out, "file with --out")
    is_model = (ckpt / "config.json").is_file() and not any((ckpt / name).is_file() for name in _OF_A_RUN)
    if is_model and not files:
        raise RecipeError(
            f"`{ckpt}` is a model folder; a recipe must say what to evaluate it on",
            hint=f"ppoctl eval recipes/quickstart.toml --ckpt {quoted(ckpt)}",
        )
    from ppoctl.wire import commands

    checkpoint = commands.find_checkpoint(ckpt, files or (), sets or ())
    evaluation = commands.evaluate(checkpoint, render.say)
    failure = None if out is None else _write(out, evaluation.readable_files()["samples.jsonl"])
    if json:
        wrong = {} if failure is None else {"error": failure.as_json()}
        answer = {"checkpoint": str(ckpt), "state": evaluation.stamp, "figures": evaluation.figures()}
        render.json({**answer, **wrong})
        return None if failure is None else int(failure.exit_code)
    rows = [(name, f"{value:.4g}") for name, value in evaluation.figures().items()]
    render.table(rows, ("figure", "value"))
    render.line()
    render.line(f"state: {evaluation.stamp}")
    if failure is not None:
        raise failure
    if out is not None:
        render.line(f"samples: {out}")
    return None


def _write(out: Path, samples: bytes) -> StorageError | None:
    """Write the samples. An error is handed back: figures that took hours are printed whatever happens to the
    samples."""
    try:
        out.write_bytes(samples)
    except OSError as error:
        out.unlink(missing_ok=True)
        return StorageError(f"cannot write `{out}`: {error.strerror}", hint=f"df -h {quoted(out.parent)}")
    return None
