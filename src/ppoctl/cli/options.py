"""Arguments and options that several commands share, so that their names and help are the same everywhere."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ppoctl.cli.summary import RUNS
from ppoctl.core.errors import RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.store.recorded_run import RecordedRun


Result = TypeVar("Result")
"""Exit code of a command, or None."""


def is_run(folder: Path) -> bool:
    """Whether the folder is a run directory: it has a run.json or, if the run.json is lost, a journal."""
    return any((folder / name).is_file() for name in ("run.json", "journal.jsonl"))


def open_run(folder: Path) -> "RecordedRun":
    """Return the run in a folder. Raises the errors of `RecordedRun.facts`, such as that it is not a run."""
    from ppoctl.store.recorded_run import RecordedRun

    return RecordedRun.open(folder)


def run_folders(parent: Path) -> list[Path]:
    """Return the run directories in a folder and in its subfolders (`--runs runs/sweep`), sorted by path."""
    return sorted(
        run
        for folder in _subfolders(parent)
        for run in ([folder] if is_run(folder) else filter(is_run, _subfolders(folder)))
    )


def _subfolders(parent: Path) -> Iterator[Path]:
    """Yield the subfolders of a folder, or nothing if the folder cannot be read.

    Folders whose names begin with a dot are skipped: they are runs that are being created or removed.
    """
    with suppress(OSError):
        yield from (path for path in parent.iterdir() if not path.name.startswith(".") and path.is_dir())


def found_run(path: Path, folder: Path = RUNS) -> Path:
    """Return `runs/q1` for `q1` if `runs/q1` is a run and `q1` is not; otherwise return the path. `folder` takes the
    place of `runs`.

    A path inside a run, such as `q1/states`, is treated alike.
    """
    below_runs = folder / path  # if the path is absolute, this is the path itself
    return (
        below_runs
        if (is_run(below_runs) and not is_run(path)) or (below_runs.exists() and not path.exists())
        else path
    )


def run_names(incomplete: str) -> list[str]:
    """Return shell completions for RUN: names of runs, or paths if the user has begun to type a path."""
    is_path = incomplete.startswith(f"{RUNS}/")
    return [str(run if is_path else run.relative_to(RUNS)) for run in run_folders(RUNS)]


Recipes = Annotated[
    list[Path],
    typer.Argument(
        metavar="RECIPE", help="TOML file, e.g. from `ppoctl recipes copy`; later files override earlier ones."
    ),
]


def key_names(incomplete: str) -> list[str]:
    """Return the recipe keys and tables whose names begin with `incomplete`."""
    from ppoctl.cli.manual.keys import key_lines

    keys = [line.key for line in key_lines()]
    tables = {key.rpartition(".")[0] for key in keys} - {""}
    return sorted(name for name in {*keys, *tables} if name.startswith(incomplete))


def _settings(incomplete: str) -> list[str]:
    """Return shell completions for `--set`: `KEY=`, without the value."""
    from ppoctl.cli.manual.keys import key_lines

    return sorted({f"{line.key}=" for line in key_lines() if line.key.startswith(incomplete)})


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set the value of a key, e.g. --set steps=40; repeatable. "
        "TABLE.KEY=VALUE changes one key of a table, TABLE={...} replaces the table. A relative path starts at the "
        "working directory; in a recipe, it starts at the recipe's folder.",
        autocompletion=_settings,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, also for an error.")]


def typed_run(context: typer.Context, path: Path) -> Path:
    """Return the run directory of an argument RUN, as `found_run` does, in the folder of `--runs`. If nothing has
    this path or name, the command raises RecipeError (`takes_run`)."""
    folder = context.params.get(_FOLDER, RUNS)
    found = found_run(path, folder)
    # `compare --eval` also reads files of `eval --out`.
    if found.exists() or path.is_absolute() or path.suffix == ".jsonl":
        return found
    elsewhere = sorted(below / path for below in _subfolders(Path()) if is_run(below / path))
    hint = "ppoctl recipes list  # no run has been created here" if folder == RUNS else f"ls {quoted(folder.parent)}"
    if folder.is_dir():
        hint = "ppoctl runs" if folder == RUNS else f"ppoctl runs {quoted(folder)}"
    if elsewhere:
        hint = f"{context.command_path} {quoted(elsewhere[0])}"
    message = f"`{path}` is not a run directory, and there is no such run in `{folder}`"
    context.meta.setdefault(_MISSING, RecipeError(message, hint=hint))
    return found


def typed_runs(context: typer.Context, paths: list[Path]) -> list[Path]:
    """Return the run directory for each path, as `typed_run` does."""
    return [typed_run(context, path) for path in paths]


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Run directory, or the name of a run in runs/.",
        callback=typed_run,
        autocompletion=run_names,
    ),
]
SeveralRuns = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="Run directories, or names of runs in runs/.",
        callback=typed_runs,
        autocompletion=run_names,
    ),
]
Wait = Annotated[
    float | None, typer.Option("--wait", metavar="SECONDS", min=0.1, help="Time for Slurm to answer. Default: 0.5.")
]
Runs = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="Folder of run directories.")]
_FOLDER, _CONTEXT, _MISSING = "folder_of_runs", "context", "ppoctl.missing_run"


def takes_run(command: Callable[..., Result]) -> Callable[..., Result]:
    """Return a command with the option `--runs`, in whose folder the arguments RUN are looked up (`typed_run`)."""

    @wraps(command)
    def run(**values: Any) -> Result:
        if (missing := values.pop(_CONTEXT).meta.get(_MISSING)) is not None:
            raise missing
        del values[_FOLDER]
        return command(**values)

    option = Annotated[
        Path, typer.Option("--runs", metavar="FOLDER", help="Folder in which RUN is looked up.", is_eager=True)
    ]
    known = signature(command)
    added = (
        Parameter(_FOLDER, Parameter.KEYWORD_ONLY, default=RUNS, annotation=option),
        Parameter(_CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context),
    )
    run.__signature__ = known.replace(parameters=[*known.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, _FOLDER: option, _CONTEXT: typer.Context}
    return run


Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also print a line for each stage.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and the result.")]
Force = Annotated[bool, typer.Option("--force", help="Start even if memory, disk or the cluster seem too small.")]
GpuGib = Annotated[
    float | None,
    typer.Option("--gpu-gib", metavar="GIB", min=1, help="Check whether the run fits on GPUs with this much memory."),
]
Here = Annotated[
    bool, typer.Option("--here", help="Check whether the run fits on the GPUs of this machine, or in its memory.")
]
FitGib = Annotated[
    float | None,
    typer.Option(
        "--fit",
        metavar="GIB",
        min=2,
        help="Search for settings that fit on GPUs with this much memory, and print the three fastest.",
    ),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=1, help="With --fit: number of GPUs. Default: the recipe's.")
]
Assets = Annotated[
    bool, typer.Option("--assets", help="Fail if a model or data are not on this machine; without it, print a note.")
]
Where = Literal["here", "slurm"]
On = Annotated[
    Where, typer.Option("--on", help="here: this process, or the nodes of this Slurm job; slurm: submit a job.")
]
TestOnly = Annotated[
    bool, typer.Option("--test-only", help="With --on slurm: ask Slurm whether it would accept the job, and exit.")
]
Chain = Annotated[
    int,
    typer.Option(
        "--chain", metavar="JOBS", min=1, help="With --on slurm: submit this many jobs, to run one after the other."
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option("--take-over", help="Continue even if another process on this host or a job is using the run."),
]


Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without", metavar="NAME", help="Train without this capability, which the recipe `requires`; repeatable."
    ),
]


def with_accepted(sets: Sequence[str] | None, without: Sequence[str] | None) -> list[str]:
    """Return the settings of `--set`, with `--without` as a further setting, so that the run's recipe records it."""
    return [*(sets or ()), *([f"without={json.dumps(list(without))}"] if without else [])]
