"""`ppoctl logs`: print the logs of a run, attempt by attempt, or follow them until the run ends.

The command works on a login node: it only reads files of the run directory and queries Slurm.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, RunArgument, open_run
from ppoctl.core import units
from ppoctl.core.errors import RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.store.log_files import Tail
    from ppoctl.store.run_paths import RunPaths

LOOK_EVERY_S = 0.25
ASK_EVERY_S = 10.0
"""Minimum seconds between two queries that ask Slurm for the remaining jobs of the run."""

LogLine = dict[str, Any]


def logs(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the log until the run ends, or until Ctrl-C.")
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", metavar="N", min=1, help="Print the logs of this attempt. Default: the newest."),
    ] = None,
    what: Annotated[
        str,
        typer.Option("--what", metavar="KIND", help="console, engines, ranks, slurm, all, or a file name."),
    ] = "console",
    lines: Annotated[
        int | None, typer.Option("-n", "--lines", metavar="COUNT", min=0, help="Start with the last COUNT lines.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the log files with their sizes.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the logs of a run. Default: the console of the run. --what selects the engines, every rank, or Slurm.
    --json prints the list of files."""
    paths = open_run(run).paths
    if list_ or json:
        _list(paths, attempt, as_json=json)
        return
    _require_known(paths, attempt)
    reader = _LogReader(paths, what, attempt, lines)
    if follow:
        try:
            _follow(reader)
        except KeyboardInterrupt:
            return
    else:
        reader.look()
        if not reader.tails:
            raise _no_log(paths, what, attempt)
    reader.finish()


class _LogReader:
    """The requested log files, each with the position up to which the file was printed."""

    def __init__(self, paths: "RunPaths", what: str, attempt: int | None, lines: int | None) -> None:
        self.paths = paths
        self.tails: dict[Path, Tail] = {}
        self._what = what
        self._attempt = attempt
        self._lines = lines
        self._printed: Path | None = None
        """File of the last line that was printed."""

    def look(self) -> None:
        """Print new lines, and open new files."""
        from ppoctl.store.log_files import Tail, chosen

        files = chosen(self.paths, self._what, self._attempt)
        is_first = not self.tails
        for path in files:
            if path not in self.tails:
                self.tails[path] = Tail(path)
                if is_first and self._lines is not None:
                    self.tails[path].skip_to_last(self._lines)
        for path, tail in self.tails.items():
            for texts in tail.new():
                self._print(path, texts)
            if path not in files:  # the file belongs to an earlier attempt and does not grow any more
                self._print(path, tail.rest())

    def finish(self) -> None:
        """Print the last lines of files that do not end with a line break."""
        for path, tail in self.tails.items():
            self._print(path, tail.rest())

    def _print(self, path: Path, texts: list[str]) -> None:
        if not texts:
            return
        if self._printed != path and len(self.tails) > 1:
            render.line(f"==> {self.paths.inside(path)} <==")
        self._printed = path
        render.line("\n".join(map(render.printable, texts)))


def _follow(reader: _LogReader) -> None:
    from ppoctl.store.append import intact

    journal, size_bytes, events = reader.paths.journal, -1, list[LogLine]()
    query_at = time.monotonic() + ASK_EVERY_S
    while True:
        if (new_size_bytes := journal.stat().st_size) != size_bytes:
            size_bytes, events = new_size_bytes, [line for line in intact(journal) if "event" in line]
        may_query = time.monotonic() >= query_at
        # This is checked before the files are read. Otherwise lines that are written in between would be lost.
        is_over = _is_over(reader.paths, events, may_query=may_query)
        query_at = time.monotonic() + ASK_EVERY_S if may_query else query_at
        reader.look()
        if is_over:
            return
        time.sleep(LOOK_EVERY_S)


def _is_over(paths: "RunPaths", events: list[LogLine], *, may_query: bool) -> bool:
    """Whether no process works on the run and no job will resume it.

    Slurm is queried only if the journal does not decide it: a job that was cancelled or killed may have written
    nothing.
    """
    from ppoctl.start.slurm.job_start import is_resumable
    from ppoctl.start.slurm.run_status import has_open_job
    from ppoctl.store.jobs import jobs
    from ppoctl.store.liveness import attempts

    newest = next(reversed(attempts(events)), None)
    if newest is not None and newest["status"] == "running":
        return False
    if not jobs(paths):
        return newest is not None and not newest["status"].startswith("running")
    if newest is not None and "exit_code" in newest and not is_resumable(newest["exit_code"]):
        return True
    return may_query and not has_open_job(paths, events)


def _list(paths: "RunPaths", attempt: int | None, *, as_json: bool) -> None:
    from ppoctl.store.log_files import of_attempt, of_slurm

    numbers = paths.attempts() if attempt is None else [attempt]
    files: list[tuple[int | None, Path]] = [(n, path) for n in numbers for path in of_attempt(paths, n)]
    files += [(None, path) for path in of_slurm(paths)] if attempt is None else []
    if as_json:
        shown = [{"file": str(path), "attempt": number, "bytes": path.stat().st_size} for number, path in files]
        render.json({"files": shown})
        return
    rows = [(number, path.name, units.size(path.stat().st_size)) for number, path in files]
    render.table(rows, ("attempt", "file", "size"))


def _require_known(paths: "RunPaths", attempt: int | None) -> None:
    attempts = paths.attempts()
    if attempt is not None and attempt not in attempts:
        known = ", ".join(map(str, attempts)) or "none yet"
        raise RecipeError(
            f"run `{paths.root}` has no attempt `{attempt}` (its attempts: {known})",
            hint=f"ppoctl logs {quoted(paths.root)} --list",
        )


def _no_log(paths: "RunPaths", what: str, attempt: int | None) -> RecipeError:
    of_attempt = "" if attempt is None else f" of attempt {attempt}"
    return RecipeError(
        f"run `{paths.root}` has no log `{what}`{of_attempt} yet",
        hint=f"ppoctl logs {quoted(paths.root)} --list",
    )
