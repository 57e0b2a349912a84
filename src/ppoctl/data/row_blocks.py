"""Stored rows as dictionaries with their places in the file, in blocks of distinct rows.

Many data sets repeat values: DAPO-Math has each of 17k prompts about a hundred times. A Python value takes a thousand
times more memory than a number. A block therefore contains the distinct rows and, for each row, the index of the
distinct row that it equals.

The module imports no torch, and pyarrow only to read parquet or a data set. `rows` converts the rows to questions.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppoctl.errors import DataError, EnvironmentProblemError
from ppoctl.recipe.row_files import opened

Place = str
"""Place of a row, as shown in messages: `file.jsonl` line 3."""
BLOCK_ROWS = 1 << 18
"""Maximum number of rows of a block."""


class Block(NamedTuple):
    """Consecutive rows: the distinct rows, and for each row the index of the distinct row that it equals."""

    rows: Sequence[tuple[Place, dict[str, Any]]]
    order: Sequence[int]


def read_jsonl(path: Path) -> Iterator[Block]:
    """Yield the rows of a JSONL file in order, without blank lines, one row per block.

    A line is parsed only when its row is requested. Raises DataError with the line number if a line is not a JSON
    object.
    """
    with opened(path) as lines:
        for number, line in enumerate(_lines(lines, path), start=1):
            if not line.strip():
                continue
            place = f"`{path}` line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig").rstrip())  # the file may begin with a byte order mark
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
                    f"{place} is JSON, but not an object with columns", hint="JSONL has one JSON object per line"
                )
            yield Block(((place, row),), (0,))


def _lines(lines: Any, path: Path) -> Iterator[bytes]:
    try:
        yield from lines
    except (OSError, EOFError) as error:  # the file is compressed, and it is truncated or invalid
        raise DataError(f"`{path}` cannot be read: {error}", hint="is the file complete?") from error


def read_parquet(path: Path, columns: Collection[str] | None, most: int | None) -> Iterator[Block]:
    """Yield the first `most` rows of a parquet file (None: all rows), with these columns (None: all columns).

    In places, rows are counted from 1. Raises DataError if the file is not valid parquet.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentProblemError(
            f"`{path}` is a parquet file, but pyarrow is not installed", hint="pip install pyarrow"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            chosen = _chosen(file.schema_arrow.names, columns)
            batches = file.iter_batches(batch_size=BLOCK_ROWS, columns=chosen)
            yield from blocks_of(batches, lambda number: f"`{path}` row {number}", most)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"`{path}` cannot be read as parquet: {error}", hint="is the file complete?") from error


def _chosen(available: Sequence[str], columns: Collection[str] | None) -> list[str] | None:
    """Return the outermost columns that contain the requested columns; None: all columns.

    If a column is missing, all columns are read, so that the error can list the existing columns.
    """
    if columns is None or any("." in name for name in available):
        return None
    heads = [column.partition(".")[0] for column in columns]
    return [name for name in available if name in heads] if set(heads) <= set(available) else None


def blocks_of(batches: Iterator[Any], place: Callable[[int], Place], most: int | None) -> Iterator[Block]:
    """Yield the first `most` rows of Arrow record batches. `place` returns the place of a row number (from 1)."""
    import numpy

    done = 0
    for batch in batches:
        part = batch if most is None else batch.slice(0, most - done)
        if not part.num_rows:
            continue
        codes = _joined([_codes(column) for column in part.columns] or [numpy.arange(part.num_rows)])
        _, first, order = numpy.unique(codes, return_index=True, return_inverse=True)
        rows = part.take(first).to_pylist()
        places = [place(done + int(number) + 1) for number in first]
        yield Block(list(zip(places, rows, strict=True)), order.tolist())
        done += part.num_rows
        if most is not None and done >= most:
            return


def _codes(column: Any) -> Any:
    """Return an integer code for each value of an Arrow column, shape [rows]. Only equal values have equal codes.

    Codes are below twice the number of values.
    """
    import numpy
    import pyarrow
    from pyarrow import compute, types

    if types.is_struct(column.type):
        inner = [_codes(child) for child in column.flatten()]
        return _joined([column.is_null().to_numpy(zero_copy_only=False).astype(numpy.int64), *inner])
    if types.is_list(column.type) or types.is_large_list(column.type):
        lengths = compute.fill_null(column.value_lengths(), -1).to_numpy(zero_copy_only=False)
        return _codes_of_lists(lengths, _codes(column.flatten()))
    try:
        coded = column.dictionary_encode(null_encoding="encode").indices
    except pyarrow.ArrowNotImplementedError:  # Arrow cannot compare this type: each value counts as distinct
        return numpy.arange(len(column))
    return coded.to_numpy(zero_copy_only=False).astype(numpy.int64)


def _codes_of_lists(lengths: Any, inner: Any) -> Any:
    """Return an integer code for each list, from the lengths (-1: null) and the codes of the values of all lists."""
    import numpy

    starts = numpy.cumsum(numpy.maximum(lengths, 0)) - numpy.maximum(lengths, 0)
    numbers, known = numpy.empty(len(lengths), numpy.int64), 0
    for length in numpy.unique(lengths):
        rows = numpy.flatnonzero(lengths == length)
        if length > _MOST_COMPARED:
            codes = numpy.arange(len(rows))
        elif length <= 0:
            codes = numpy.zeros(len(rows), numpy.int64)
        else:
            codes = _joined([inner[starts[rows] + number] for number in range(length)])
        numbers[rows] = codes + known
        known += int(codes.max()) + 1
    return numbers


_MOST_COMPARED = 64
"""Maximum length of lists that are compared. Longer lists (token ids, numbers) rarely repeat."""


def _joined(columns: Sequence[Any]) -> Any:
    """Return one integer code for each row, from the codes of the row in several columns."""
    import numpy

    joined = columns[0]
    for column in columns[1:]:
        pairs = joined * (int(column.max(initial=0)) + 1) + column
        joined = numpy.unique(pairs, return_inverse=True)[1]
    return joined


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column. Dots select nested columns, unless a column has that name. Raises KeyError."""
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    inner = row.get(head)
    if not dot or not isinstance(inner, Mapping):
        raise KeyError(column)
    return lookup(inner, rest)


def columns_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of all columns that `lookup` finds. Names of nested columns have dots."""
    names: list[str] = []
    for name, value in row.items():
        names += [f"{name}.{inner}" for inner in columns_of(value)] if isinstance(value, Mapping) else [name]
    return names
