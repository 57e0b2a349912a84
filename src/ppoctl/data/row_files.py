"""Row files of a table, found by name, folder or glob, and the number of their rows, counted without parsing."""

import glob
import gzip
import os
from io import BufferedIOBase
from pathlib import Path

from ppoctl.core.errors import DataError, MissingFileError, RecipeError, quoted
from ppoctl.data.row_tables import AnyRows, MixRows, SingleTable, StoredRows
from ppoctl.models.folder import is_url

JSONL = (".jsonl", ".jsonl.gz")
PARQUET = ".parquet"
_READABLE = (*JSONL, PARQUET)


def files_of(table: StoredRows, *, key: str) -> list[Path]:
    """Return the files of a table's `path` in reading order; files of a folder or a glob are sorted by name.

    `key` is the dotted key of the table. Raises MissingFileError if a path does not exist, and RecipeError for a
    file with an unknown suffix or a folder without row files.
    """
    paths = table.path if isinstance(table.path, tuple) else (table.path or "",)
    files = [file for path in paths for file in _files_at(path, key=f"{key}.path")]
    for file in files:
        if not file.name.endswith(_READABLE):
            raise RecipeError(
                f"`{key}.path` is `{file}`: must end in `.jsonl`, `.jsonl.gz` or `.parquet`",
                hint='`format = "python"` reads any other file with your own function',
            )
    return files


def _files_at(path: str, *, key: str) -> list[Path]:
    if is_url(path):
        raise RecipeError(
            f"`{key}` is `{path}`, a URL; rows are read only from files on this machine",
            hint=f"fetch it first, then --set {key}={quoted(f'./{Path(path).name}')}",
        )
    file = Path(path)
    if os.path.isdir(file):  # noqa: PTH112 - Path.is_dir raises if a parent folder is not readable
        inside = sorted(entry for entry in file.iterdir() if entry.name.endswith(_READABLE))
        if not inside:
            raise RecipeError(
                f"`{key}` is `{file}`: a folder without `.jsonl` or `.parquet`", hint=f"ls {quoted(file)}"
            )
        return inside
    if os.path.exists(file):  # noqa: PTH110 - Path.exists also raises for such a folder
        return [file]
    if glob.has_magic(path):
        if matching := sorted(glob.glob(path, recursive=True)):  # noqa: PTH207 - the pattern is a complete path
            return [Path(name) for name in matching]
        raise MissingFileError(f"`{key}` is `{path}`: no file matches", hint=f"ls {quoted(_folder_of(path))}")
    raise MissingFileError(f"`{key}` is `{file}`: no such file", hint=f"ls {quoted(file.parent)}")


def _folder_of(pattern: str) -> Path:
    """Return the longest parent folder of a glob whose path has no special character."""
    parts = Path(pattern).parts
    return Path(*parts[: next(number for number, part in enumerate(parts) if glob.has_magic(part))])


def rows_of(table: AnyRows) -> int | None:
    """Return the number of rows in one epoch of a table, before rows are dropped; None if the rows cannot be counted
    without parsing."""
    if isinstance(table, MixRows):
        sources = [(rows_of(source), source.weight) for source in table.sources.values()]
        known = [in_an_epoch(rows, weight) for rows, weight in sources if rows is not None]
        return sum(known) if len(known) == len(sources) else None
    return _rows_of(table)


def in_an_epoch(rows: int, weight: float) -> int:
    """Return the number of rows that a source of this weight has in each epoch of its mix."""
    return round(rows * weight)


def _rows_of(table: SingleTable) -> int | None:
    if not isinstance(table, StoredRows) or table.path is None or table.duplicates == "drop":
        return None
    try:
        counts = [_rows_in(file) for file in files_of(table, key="data")]
    except (MissingFileError, RecipeError):
        return None
    known = [rows for rows in counts if rows is not None]
    if len(known) != len(counts):
        return None
    return sum(known) if table.max_rows is None else min(sum(known), table.max_rows)


def _rows_in(file: Path) -> int | None:
    """Return the number of nonblank JSONL lines, or the row count in a parquet footer; None if the file is not
    readable."""
    try:
        if file.suffix == PARQUET:
            from pyarrow import parquet

            return int(parquet.read_metadata(file).num_rows)
        with opened(file) as lines:
            return sum(1 for line in lines if line.strip())
    except (OSError, EOFError, ValueError, DataError):  # pyarrow's errors are subclasses of these
        return None


def opened(path: Path) -> BufferedIOBase:
    """Open a JSONL file for reading bytes, and decompress it if its name ends in `.gz`. Raises DataError if it cannot
    be opened."""
    try:
        return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {error.strerror}", hint=f"ls -l {quoted(path)}") from error
