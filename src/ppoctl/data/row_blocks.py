"""Stored rows as dictionaries, each with its place, equal ones once. Imports no torch; pyarrow only where parquet or
a data set is read. Knows nothing of prompts: see `rows`.

A column repeats itself in many data sets (DAPO-Math has each of 17k prompts about a hundred times), and a value of
Python costs a thousand times what a number costs. So rows come in blocks: those that differ, and for each row which.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppoctl.errors import DataError, EnvironmentProblemError
from ppoctl.recipe.row_files import opened

Place = str
"""Place of a row in words that a person can follow: `file.jsonl` line 3."""
BLOCK_ROWS = 1 << 18
"""Most rows of a block."""


class Block(NamedTuple):
    """Some rows in a row: those that differ, and for each row the number of the one that it equals."""

    rows: Sequence[tuple[Place, dict[str, Any]]]
    order: Sequence[int]


def read_jsonl(path: Path) -> Iterator[Block]:
    """Rows of a JSONL file, in order, without blank lines, each a block of its own: the next line is not looked at
    before it is asked for. Raises DataError naming the line that is not a JSON object."""
    with opened(path) as lines:
        for number, line in enumerate(_lines(lines, path), start=1):
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
            yield Block(((place, row),), (0,))


def _lines(lines: Any, path: Path) -> Iterator[bytes]:
    try:
        yield from lines
    except (OSError, EOFError) as error:  # a packed file that ends in the middle, or is none
        raise DataError(f"`{path}` cannot be read: {error}", hint="is the file complete?") from error


def read_parquet(path: Path, columns: Collection[str] | None, most: int | None) -> Iterator[Block]:
    """The first `most` rows of a parquet file, in order, counted from 1, with these columns; None: all. Raises
    DataError on a file that is no parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentProblemError(
            f"`{path}` is a parquet file, and pyarrow is not installed", hint="pip install pyarrow"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            chosen = _chosen(file.schema_arrow.names, columns)
            batches = file.iter_batches(batch_size=BLOCK_ROWS, columns=chosen)
            yield from blocks_of(batches, lambda number: f"`{path}` row {number}", most)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"`{path}` cannot be read as parquet: {error}", hint="is the file complete?") from error


def _chosen(there: Sequence[str], columns: Collection[str] | None) -> list[str] | None:
    """The outermost columns that hold those that are wanted. None: all, also where one is not found, so that the
    error can say what there is."""
    if columns is None or any("." in name for name in there):
        return None
    heads = [column.partition(".")[0] for column in columns]
    return [name for name in there if name in heads] if set(heads) <= set(there) else None


def blocks_of(batches: Iterator[Any], place: Callable[[int], Place], most: int | None) -> Iterator[Block]:
    """The first `most` rows of Arrow's record batches. `place` says where the row of a number, from 1, stands."""
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
    """A whole number for each value of a column of Arrow's, equal only where values are; numbers are below twice the
    count of values."""
    import numpy
    import pyarrow
    from pyarrow import compute, types

    if types.is_struct(column.type):
        inner = [_codes(each) for each in column.flatten()]
        return _joined([column.is_null().to_numpy(zero_copy_only=False).astype(numpy.int64), *inner])
    if types.is_list(column.type) or types.is_large_list(column.type):
        lengths = compute.fill_null(column.value_lengths(), -1).to_numpy(zero_copy_only=False)
        return _codes_of_lists(lengths, _codes(column.flatten()))
    try:
        coded = column.dictionary_encode(null_encoding="encode").indices
    except pyarrow.ArrowNotImplementedError:  # of a type that is not compared: each value stands for itself
        return numpy.arange(len(column))
    return coded.to_numpy(zero_copy_only=False).astype(numpy.int64)


def _codes_of_lists(lengths: Any, inner: Any) -> Any:
    """Numbers of lists, from their lengths (-1: null) and the numbers of all their values, one list after another."""
    import numpy

    starts = numpy.cumsum(numpy.maximum(lengths, 0)) - numpy.maximum(lengths, 0)
    found, known = numpy.empty(len(lengths), numpy.int64), 0
    for length in numpy.unique(lengths):
        rows = numpy.flatnonzero(lengths == length)
        if length > _MOST_COMPARED:
            codes = numpy.arange(len(rows))
        elif length <= 0:
            codes = numpy.zeros(len(rows), numpy.int64)
        else:
            codes = _joined([inner[starts[rows] + number] for number in range(length)])
        found[rows] = codes + known
        known += int(codes.max()) + 1
    return found


_MOST_COMPARED = 64
"""Longest lists that are compared; longer ones (tokens, figures) hardly repeat."""


def _joined(columns: Sequence[Any]) -> Any:
    """One number for the numbers of a row in several columns."""
    import numpy

    joined = columns[0]
    for column in columns[1:]:
        pairs = joined * (int(column.max(initial=0)) + 1) + column
        joined = numpy.unique(pairs, return_inverse=True)[1]
    return joined


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
