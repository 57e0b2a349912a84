"""Files of rows that a table names: found by name, folder or glob, and counted without reading a row."""

import glob
import gzip
import os
from io import BufferedIOBase
from pathlib import Path

from ppoctl.errors import DataError, MissingAssetError, RecipeError, quoted
from ppoctl.model.folder import is_url
from ppoctl.recipe.rows import AnyRows, MixRows, SingleTable, StoredRows

JSONL = (".jsonl", ".jsonl.gz")
PARQUET = ".parquet"
_READABLE = (*JSONL, PARQUET)


def files_of(table: StoredRows, *, key: str) -> list[Path]:
    """Files of a table that names them by `path`, in the order in which they are read; a folder's and a glob's by
    name. `key` is the table's.

    Raises MissingAssetError where a path leads to nothing, RecipeError on a file or a folder that holds no rows by
    its name.
    """
    named = table.path if isinstance(table.path, tuple) else (table.path or "",)
    found = [file for path in named for file in _found(path, key=f"{key}.path")]
    for file in found:
        if not file.name.endswith(_READABLE):
            raise RecipeError(
                f"`{key}.path` is `{file}`: must end in `.jsonl`, `.jsonl.gz` or `.parquet`",
                hint='`format = "python"` reads any other file with a function of your own',
            )
    return found


def _found(path: str, *, key: str) -> list[Path]:
    if is_url(path):
        raise RecipeError(
            f"`{key}` is `{path}`, a URL; rows are read from files of this machine",
            hint=f"fetch it first, then --set {key}={quoted(f'./{Path(path).name}')}",
        )
    file = Path(path)
    if os.path.isdir(file):  # noqa: PTH112 - no error where a folder above is closed
        inside = sorted(each for each in file.iterdir() if each.name.endswith(_READABLE))
        if not inside:
            raise RecipeError(
                f"`{key}` is `{file}`: a folder without `.jsonl` or `.parquet`", hint=f"ls {quoted(file)}"
            )
        return inside
    if os.path.exists(file):  # noqa: PTH110 - the same
        return [file]
    if glob.has_magic(path):
        if matching := sorted(glob.glob(path, recursive=True)):  # noqa: PTH207 - the pattern is a whole path
            return [Path(each) for each in matching]
        raise MissingAssetError(f"`{key}` is `{path}`: no file has such a name", hint=f"ls {quoted(_before(path))}")
    raise MissingAssetError(f"`{key}` is `{file}`: no such file", hint=f"ls {quoted(file.parent)}")


def _before(pattern: str) -> Path:
    """The innermost folder in front of a glob's first special character."""
    parts = Path(pattern).parts
    return Path(*parts[: next(number for number, part in enumerate(parts) if glob.has_magic(part))])


def rows_of(table: AnyRows) -> int | None:
    """Rows that one epoch of a table has before any is dropped; None where they cannot be counted without reading
    them."""
    if isinstance(table, MixRows):
        each = [(rows_of(source), source.weight) for source in table.sources.values()]
        known = [in_an_epoch(rows, weight) for rows, weight in each if rows is not None]
        return sum(known) if len(known) == len(each) else None
    return _rows_of(table)


def in_an_epoch(rows: int, weight: float) -> int:
    """Rows that a source of this weight has in each epoch of its mix."""
    return round(rows * weight)


def _rows_of(table: SingleTable) -> int | None:
    if not isinstance(table, StoredRows) or table.path is None or table.duplicates == "drop":
        return None
    try:
        counts = [_rows_in(file) for file in files_of(table, key="data")]
    except (MissingAssetError, RecipeError):
        return None
    known = [rows for rows in counts if rows is not None]
    if len(known) != len(counts):
        return None
    return sum(known) if table.max_rows is None else min(sum(known), table.max_rows)


def _rows_in(file: Path) -> int | None:
    """Lines of JSONL that are not blank, or what a parquet file says it has; None: it cannot be read."""
    try:
        if file.suffix == PARQUET:
            from pyarrow import parquet

            return int(parquet.read_metadata(file).num_rows)
        with opened(file) as lines:
            return sum(1 for line in lines if line.strip())
    except (OSError, EOFError, ValueError, DataError):  # pyarrow's own are of these
        return None


def opened(path: Path) -> BufferedIOBase:
    """A JSONL file's bytes, unpacked where it is packed. Raises DataError where it cannot be read."""
    try:
        return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {error.strerror}", hint=f"ls -l {quoted(path)}") from error
