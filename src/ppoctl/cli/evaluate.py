"""`ppoctl eval`: how good a checkpoint is, on the recipe's evaluation sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import Json, On, Sets, TestOnly, as_typed
from ppoctl.cli.submission import Submission
from ppoctl.cli.working import working
from ppoctl.doing import preparing
from ppoctl.errors import RecipeError, quoted

_OF_A_RUN = ("run.json", "manifest.json")


def evaluate(
    ckpt: Annotated[
        Path,
        typer.Option("--ckpt", help="A run, one of its states/actor/N folders, or a model folder (with RECIPE)."),
    ],
    files: Annotated[list[Path] | None, typer.Argument(metavar="[RECIPE]...", help="Default: the run's own.")] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every sample to this file, JSONL or .parquet.")
    ] = None,
    on: On = "here",
    test_only: TestOnly = False,
    json: Json = False,
) -> None:
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
    if on == "slurm":
        _submit(ckpt, files or (), sets or (), out, Submission(test_only=test_only, chain=1, as_json=json))
        return
    with working(as_typed("eval", [*(files or ()), "--ckpt", ckpt], sets or ())) as (_, gate):
        gate.at, gate.keeps = "", "an evaluation keeps nothing before it is done"
        with preparing("loading libraries"):
            from ppoctl.store import eval_samples
            from ppoctl.wire import commands

        checkpoint = commands.find_checkpoint(ckpt, files or (), sets or ())
        evaluation = commands.evaluate(checkpoint, lambda text: render.say(render.printable(text)))
    figures = evaluation.figures()
    if json:
        render.json({"checkpoint": str(ckpt), "state": evaluation.stamp, "figures": figures})
    else:
        render.table([(name, f"{value:.4g}") for name, value in figures.items()], ("figure", "value"))
        render.line()
        render.line(f"state: {evaluation.stamp}")
    # Last: figures that took hours are printed whatever happens to the samples.
    if out is not None:
        eval_samples.write(out, evaluation.rows)
        if not json:
            render.line(f"samples: {out}")


def _submit(ckpt: Path, files: Sequence[Path], sets: Sequence[str], out: Path | None, submission: Submission) -> None:
    from ppoctl.recipe.load import load
    from ppoctl.slurm.script import Work
    from ppoctl.store.layout import RunLayout
    from ppoctl.wire.run_recipe import loaded_of
    from ppoctl.wire.sources import run_of
    from ppoctl.wire.submission import as_options

    root = ckpt if (ckpt / "run.json").is_file() else run_of(ckpt).root
    layout = RunLayout(root.absolute())
    loaded = load(files, sets) if files else loaded_of(layout, sets)
    words = ["eval", *(str(file.absolute()) for file in files), "--ckpt", str(ckpt.absolute())]
    words += as_options(loaded, sets)
    words += [] if out is None else ["--out", str(out.absolute())]
    folder, log = Path.cwd(), "slurm-eval-%j.log"
    if layout.run_json.is_file():
        folder, log = layout.root, f"logs/{log}"
    submission.other(loaded, Work((*words, "--on", "here"), folder, log, is_run=False))
