"""Files of rows as dictionaries, each with its place in the file. Imports no torch; pyarrow only where a parquet file
is read. Knows nothing of prompts: see `rows`."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppoctl.errors import DataError, EnvironmentProblemError, MissingAssetError, RecipeError

Place = str
"""Place of a row in words that a person can follow: `file.jsonl` line 3."""


def existing(path: str, *, key: str) -> Path:
    """File at this path, which was set at `key`. Raises MissingAssetError where there is none, RecipeError where it
    is a folder."""
    file = Path(path)
    if os.path.isdir(file):  # noqa: PTH112 - no error where a folder above is closed
        raise RecipeError(f"`{key}` is `{file}`: a folder", hint=f"ls {file}  # then --set {key}=FILE")
    if not os.path.exists(file):  # noqa: PTH110 - the same
        raise MissingAssetError(f"`{key}` is `{file}`: no such file", hint=f"ls {file.parent}")
    return file


def read_jsonl(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Rows of a JSONL file, in order, without blank lines. Raises DataError naming the line that is not a JSON
    object."""
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"`{path}` line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig").rstrip())  # an invisible mark may begin the file
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{place} is not JSON: {error.msg} (column {error.colno})",
                    hint="JSONL has one JSON object per line",
                ) from error
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{place} is not UTF-8: {error.reason} (byte {error.start + 1})",
                    hint=f"iconv -f ENCODING -t UTF-8 {path} > utf8{path.suffix}  # `file {path}` guesses it",
                ) from error
            except RecursionError as error:
                raise DataError(f"{place} is nested too deep", hint="JSONL has one JSON object per line") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{place} is JSON, but no object with columns", hint="JSONL has one JSON object per line"
                )
            yield place, row


def read_parquet(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Rows of a parquet file, in order, counted from 1. Raises DataError on a file that is no parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentProblemError(
            f"`{path}` is a parquet file, and pyarrow is not installed", hint="pip install pyarrow"
        ) from error
    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"`{path}` row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"`{path}` cannot be read as parquet: {error}", hint="is the file complete?") from error


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """Value of a column; dots reach into nested columns unless a column has that very name. Raises KeyError."""
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    inner = row.get(head)
    if not dot or not isinstance(inner, Mapping):
        raise KeyError(column)
    return lookup(inner, rest)


def columns_of(row: Mapping[str, Any]) -> list[str]:
    """Names of columns that `lookup` finds, nested ones with dots."""
    names: list[str] = []
    for name, value in row.items():
        names += [f"{name}.{inner}" for inner in columns_of(value)] if isinstance(value, Mapping) else [name]
    return names


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {error.strerror}", hint=f"ls -l {path}") from error
