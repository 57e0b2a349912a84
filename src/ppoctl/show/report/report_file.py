"""Writing the file of a report. A report replaces only an earlier report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppoctl.core.errors import RecipeError, StorageError, quoted
from ppoctl.show.report.contents import Contents, contents
from ppoctl.show.report.render_page import MARK, html
from ppoctl.show.report.run_reader import read_runs
from ppoctl.store.output_file import write_output

MOST_RUNS = 8
"""Maximum number of runs in a report. Colours and dashes cannot distinguish more runs."""
MOST_BYTES = 2_000_000
OWN_BYTES = 150_000
"""Maximum number of bytes of the page without metrics and samples: style, script and markup."""
LONGEST_NAME = 80


@dataclass(frozen=True)
class Written:
    """A report that was written."""

    path: Path
    size: int
    runs: tuple[str, ...]
    samples: int
    left_out: tuple[str, ...]


def write_report(folders: Sequence[Path], out: Path | None, *, steps: int, most_bytes: int = MOST_BYTES) -> Written:
    """Write the report of the runs in these folders, with samples of `steps` steps per run, in at most `most_bytes`.

    Without `out`, the file is in the working directory and named after the runs. An earlier report is replaced.

    Raises RecipeError if a folder is not a run, or if `out` exists and is not a report; StorageError if the file
    cannot be written or a run cannot be read.
    """
    if len(folders) > MOST_RUNS:
        message = f"`{len(folders)}` runs: a report compares at most {MOST_RUNS}"
        raise RecipeError(message, hint=_typed(folders[:MOST_RUNS]))
    runs = read_runs(folders)
    path = Path(_name([str(run.facts["name"]) for run in runs])) if out is None else out
    _require_free(path, folders)
    found = contents(runs, steps=steps, room=most_bytes - OWN_BYTES)
    page = _page(found)
    write_output(path, page)
    return Written(path, len(page), tuple(run.label for run in runs), found.shown, found.left_out)


def report_text(folder: Path, *, steps: int) -> str:
    """Return the HTML of a report on the run in this folder, for a caller that stores the HTML elsewhere.

    Raises the errors of `write_report`, except the errors about the output file.
    """
    return _page(contents(read_runs([folder]), steps=steps, room=MOST_BYTES - OWN_BYTES)).decode("utf-8")


def _page(found: Contents) -> bytes:
    text = html({**found.words, "left_out": found.left_out}, found.data)
    # The text of a model may contain a lone surrogate, which UTF-8 cannot encode.
    return text.encode("utf-8", errors="xmlcharrefreplace")


def _typed(folders: Sequence[Path], *more: str) -> str:
    """Return the `ppoctl report` command for these runs, quoted for a shell."""
    return " ".join(["ppoctl report", *map(quoted, folders), *more])


def _name(names: Sequence[str]) -> str:
    joined = "-".join(names)
    return f"{joined if len(joined) <= LONGEST_NAME else f'{names[0]}-and-{len(names) - 1}-more'}.html"


def _require_free(path: Path, folders: Sequence[Path]) -> None:
    """Raise RecipeError if the path cannot be the file of a report. The check runs before samples are read."""
    again = _typed(folders, "-o", "another.html")
    inside = next((folder for folder in folders if path.resolve().is_relative_to(folder.resolve())), None)
    if inside is not None:
        raise RecipeError(f"`{path}` is in the run `{inside}`, which a report must not change", hint=again)
    if path.is_dir():
        raise RecipeError(f"`{path}` is a folder", hint=again)
    if path.exists() and not _is_report(path):
        raise RecipeError(f"`{path}` exists and is not a report: it is not replaced", hint=again)


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(1000)
    except OSError as error:
        raise StorageError(f"`{path}` cannot be read: {error.strerror}", hint=f"ls -l {quoted(path)}") from error
