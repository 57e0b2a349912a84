"""`ppoctl eval`: evaluate a checkpoint on the evaluation sets of the recipe."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ppoctl.cli import render
from ppoctl.cli.long_command import engine_ahead, working
from ppoctl.cli.options import JsonOption, On, Sets, TestOnly, found_run, run_names
from ppoctl.cli.submission import Submission
from ppoctl.core.activity import loading
from ppoctl.core.errors import RESUME_RUN, PpoctlError, RecipeError, as_typed, quoted

_RUN_FILES = ("run.json", "manifest.json")
_MODEL_FILE = "config.json"
_CHECKPOINTS = "a run, one of its states/actor/N folders, or a model folder (with RECIPE)"


def evaluate(
    words: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN|FOLDER|RECIPE",
            help=f"Checkpoint to evaluate: {_CHECKPOINTS}; and recipes. Default: the run's own.",
            autocompletion=run_names,
        ),
    ] = None,
    ckpt: Annotated[
        Path | None, typer.Option("--ckpt", metavar="RUN|FOLDER", help="Checkpoint to evaluate, as an option.")
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write every sample to FILE, as JSONL or .parquet.")
    ] = None,
    on: On = "here",
    test_only: TestOnly = False,
    json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint on the evaluation sets. Prints greedy and sampled pass@1 with standard errors, which are
    computed as in `train`."""
    checkpoint, files = _arguments(words or (), ckpt)
    _require_known(checkpoint, files)
    if out is not None:
        from ppoctl.store.writable_folders import require_new

        require_new(out, "file with --out")
    if on == "slurm":
        _submit(checkpoint, files, sets or (), out, Submission(test_only=test_only, chain=1, as_json=json))
        return
    _print_result(checkpoint, _evaluated(checkpoint, files, sets or ()), out, as_json=json)


def _print_result(checkpoint: Path, evaluation: Any, out: Path | None, *, as_json: bool) -> None:
    metrics = evaluation.metrics()
    if as_json:
        render.json({"checkpoint": str(checkpoint), "state": evaluation.stamp, "figures": metrics})
    else:
        render.table([(name, f"{value:.4g}") for name, value in metrics.items()], ("metric", "value"))
        render.line()
        render.line(f"state: {evaluation.stamp}")
    # Samples are written last, so that metrics that took hours are printed even if writing the samples fails.
    if out is not None:
        from ppoctl.store import eval_samples

        eval_samples.write(out, evaluation.rows)
        if not as_json:
            render.line(f"samples: {out}")


def _arguments(words: Sequence[Path], ckpt: Path | None) -> tuple[Path, list[Path]]:
    """Return the checkpoint and the recipes, typed in any order: a checkpoint is a folder, a recipe is a file."""
    files = [word for word in words if word.suffix == ".toml" or word.is_file()]
    checkpoints = [*(word for word in words if word not in files), *([] if ckpt is None else [ckpt])]
    if not checkpoints:
        raise RecipeError(f"the checkpoint to evaluate is missing: {_CHECKPOINTS}", hint="ppoctl eval --help")
    if len(checkpoints) > 1:
        several = ", ".join(f"`{path}`" for path in checkpoints)
        raise RecipeError(
            f"`ppoctl eval` evaluates one checkpoint, not {several}", hint=f"ppoctl eval {quoted(checkpoints[0])}"
        )
    return found_run(checkpoints[0]), files


def _require_known(path: Path, files: Sequence[Path]) -> None:
    """Raise RecipeError if the path cannot be evaluated. This check runs before the imports, which take seconds."""
    if not any((path / name).is_file() for name in (*_RUN_FILES, _MODEL_FILE)):
        raise RecipeError(
            f"`{path}` is neither a run, a saved actor state nor a model folder",
            hint=f"ls {quoted(path)}" if path.is_dir() else "ppoctl runs",
        )
    if not files and not any((path / name).is_file() for name in _RUN_FILES):
        raise RecipeError(
            f"`{path}` is a model folder: add a recipe that names the evaluation sets",
            hint=f"ppoctl eval {quoted(path)} recipes/quickstart.toml",
        )


def _evaluated(checkpoint: Path, files: Sequence[Path], sets: Sequence[str]) -> Any:
    typed = as_typed("eval", [checkpoint, *files], sets)
    with working(typed) as (_, gate), _named(typed):
        gate.at, gate.keeps = "", "an evaluation saves nothing before it is done"
        from ppoctl.run.eval_target import find_checkpoint

        found = find_checkpoint(checkpoint, files, sets)
        with engine_ahead(found.recipe):
            with loading("libraries"):
                from ppoctl.run import run_commands

            return run_commands.evaluate(found, lambda text: render.print_stderr(render.printable(text)))


@contextmanager
def _named(command: str) -> Iterator[None]:
    """Context whose errors name this command in a hint that resumes RUN: lower packages do not know the command."""
    try:
        yield
    except PpoctlError as error:
        if error.hint is not None:
            error.hint = error.hint.replace(RESUME_RUN, command)
        raise


def _submit(ckpt: Path, files: Sequence[Path], sets: Sequence[str], out: Path | None, submission: Submission) -> None:
    from ppoctl.recipe.loading.load import load
    from ppoctl.run.run_recipe import loaded_of
    from ppoctl.run.submit_job import as_options
    from ppoctl.run.wire.sources import run_of
    from ppoctl.start.slurm.script import Work
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.run_paths import RunPaths

    root = ckpt if (ckpt / "run.json").is_file() else run_of(ckpt).root
    paths = RunPaths(root.absolute())
    loaded = load(files, sets) if files else loaded_of(RecordedRun(paths), sets)
    words = ["eval", *(str(file.absolute()) for file in files), "--ckpt", str(ckpt.absolute())]
    words += as_options(loaded, sets)
    words += [] if out is None else ["--out", str(out.absolute())]
    folder, log = Path.cwd(), "slurm-eval-%j.log"
    if paths.run_json.is_file():
        folder, log = paths.root, f"logs/{log}"
    submission.other(loaded, Work((*words, "--on", "here"), folder, log, is_run=False))
