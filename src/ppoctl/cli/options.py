"""Arguments and options that several commands share, so that they are spelled and explained alike."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from ppoctl.cli.summary import RUNS
from ppoctl.errors import quoted


def is_run(folder: Path) -> bool:
    """Whether the folder is a run directory, as far as one look tells; one that lost its run.json is still one."""
    return any((folder / name).is_file() for name in ("run.json", "journal.jsonl"))


def run_folders(parent: Path) -> list[Path]:
    """The run directories in a folder and in its folders, where `--runs runs/sweep` puts them, by name."""
    return sorted(
        run for folder in _inside(parent) for run in ([folder] if is_run(folder) else filter(is_run, _inside(folder)))
    )


def _inside(parent: Path) -> Iterator[Path]:
    """The folders in a folder; none where it may not be read. What is being made or removed has a dot in front."""
    with suppress(OSError):
        yield from (path for path in parent.iterdir() if not path.name.startswith(".") and path.is_dir())


def found_run(path: Path) -> Path:
    """The run directory that was meant: `runs/q1` for `q1`, where only the first is a run; so for what is in one."""
    meant = RUNS / path  # the path itself, where that is absolute
    return meant if (is_run(meant) and not is_run(path)) or (meant.exists() and not path.exists()) else path


def run_names(incomplete: str) -> list[str]:
    """What may be typed as RUN: names, or paths where one was begun."""
    is_path = incomplete.startswith(f"{RUNS}/")
    return [str(run if is_path else run.relative_to(RUNS)) for run in run_folders(RUNS)]


Recipes = Annotated[
    list[Path],
    typer.Argument(
        metavar="RECIPE", help="TOML file, as `ppoctl recipes copy` makes one; a later one overrides an earlier one."
    ),
]


def key_names(incomplete: str) -> list[str]:
    """The keys of a recipe that begin so, and the tables they are in, which is where a KEY may end."""
    from ppoctl.manual.keys import key_lines

    keys = [line.key for line in key_lines()]
    tables = {key.rpartition(".")[0] for key in keys} - {""}
    return sorted(name for name in {*keys, *tables} if name.startswith(incomplete))


def _settings(incomplete: str) -> list[str]:
    """What may be typed behind `--set`, up to the value."""
    from ppoctl.manual.keys import key_lines

    return sorted({f"{line.key}=" for line in key_lines() if line.key.startswith(incomplete)})


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Give one key another value, e.g. --set steps=40; repeatable. "
        "TABLE.KEY=VALUE changes one key of a table, TABLE={...} replaces the table.",
        autocompletion=_settings,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, errors included.")]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Run directory, or the name of one in runs/.",
        callback=found_run,
        autocompletion=run_names,
    ),
]


def found_runs(paths: list[Path]) -> list[Path]:
    """The run directories that were meant, see `found_run`."""
    return [found_run(path) for path in paths]


SeveralRuns = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="Run directories, or names of runs in runs/.",
        callback=found_runs,
        autocompletion=run_names,
    ),
]
Wait = Annotated[
    float | None, typer.Option("--wait", metavar="SECONDS", min=0.1, help="Time for Slurm to answer; default: 0.5.")
]
Runs = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="Folder of run directories.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print a line per stage, too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and the result.")]
Force = Annotated[
    bool, typer.Option("--force", help="Start although memory, disk or the cluster are judged too small.")
]
GpuGib = Annotated[
    float | None,
    typer.Option("--gpu-gib", metavar="GIB", min=1, help="Judge whether it fits GPUs of so much memory."),
]
Here = Annotated[bool, typer.Option("--here", help="Judge whether it fits this machine: its GPUs, else its memory.")]
Assets = Annotated[
    bool, typer.Option("--assets", help="Refuse a model or data that are not on this machine; else a note says so.")
]
Where = Literal["here", "slurm"]
On = Annotated[
    Where, typer.Option("--on", help="here: in this process, or over the nodes of this job; slurm: submit a job.")
]
TestOnly = Annotated[
    bool, typer.Option("--test-only", help="With --on slurm: ask Slurm whether it would take the job, and stop.")
]
Chain = Annotated[
    int,
    typer.Option("--chain", metavar="JOBS", min=1, help="With --on slurm: submit so many jobs, one after the other."),
]
TakeOver = Annotated[
    bool,
    typer.Option("--take-over", help="Go on although another process of this host, or a job, is at work on the run."),
]


Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without", metavar="NAME", help="Accept that ppoctl lacks what the recipe `requires`; repeatable."
    ),
]


def with_accepted(sets: Sequence[str] | None, without: Sequence[str] | None) -> list[str]:
    """The settings of `--set`, and those of `--without` as one of them, so that the run keeps what was accepted."""
    return [*(sets or ()), *([f"without={json.dumps(list(without))}"] if without else [])]


def as_typed(command: str, words: Sequence[str | Path], sets: Sequence[str]) -> str:
    """The command line that begins again what was stopped before there was a run."""
    return " ".join(["ppoctl", command, *map(quoted, words), *(f"--set {quoted(item)}" for item in sets)])
