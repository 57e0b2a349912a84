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

from ppoctl.core.errors import DataError, EnvironmentProblemError, quoted
from ppoctl.data.row_files import opened

Place = str
"""Place of a row, as shown in messages: `file.jsonl` line 3."""
BLOCK_ROWS = 1 << 18
"""Maximum number of rows of a block."""


class Block(NamedTuple):
    """Consecutive rows: the distinct rows, and for each row the index of the distinct row that it equals."""

    rows: Sequence[tuple[Place, dict[str, Any] | DataError]]
    """Place and columns of each distinct row, or the error of a row that cannot be read."""
    order: Sequence[int]
    null_is_absent: bool = False
    """Whether a mapping has null for each key that it lacks, as in Arrow."""


def read_jsonl(path: Path) -> Iterator[Block]:
    """Yield the rows of a JSONL file in order, without blank lines, one row per block.

    A line is parsed only when its row is requested. A line that is not a JSON object is a row with an error.
    """
    with opened(path) as lines:
        for number, line in enumerate(_lines(lines, path), start=1):
            if not line.strip():
                continue
            place = f"`{path}` line {number}"
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DataError(
                    f"{place} is not UTF-8: the file is UTF-16",
                    hint=f"iconv -f UTF-16 -t UTF-8 {quoted(path)} > {quoted(f'utf8{path.suffix}')}",
                )
            yield Block(((place, _row(line, place, path)),), (0,))


def _row(line: bytes, place: Place, path: Path) -> dict[str, Any] | DataError:
    hint = "JSONL has one JSON object per line"
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip(), object_pairs_hook=_object)  # may begin with an order mark
    except json.JSONDecodeError as error:
        return DataError(f"{place} is not JSON: {error.msg} (column {error.colno})", hint=hint)
    except UnicodeDecodeError as error:
        return DataError(
            f"{place} is not UTF-8: {error.reason} (byte {error.start + 1})",
            hint=f"iconv -f ENCODING -t UTF-8 {quoted(path)} > {quoted(f'utf8{path.suffix}')}  "
            f"# `file {quoted(path)}` guesses it",
        )
    except RecursionError:
        return DataError(f"{place} is nested too deep", hint=hint)
    except ValueError as error:  # a repeated key, or a whole number with thousands of digits
        return DataError(f"{place} is not JSON: {str(error).split(';')[0]}", hint="fix the row")
    if not isinstance(row, dict):
        return DataError(f"{place} is JSON, but not an object with columns", hint=hint)
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a key occurs twice: Python would drop the first value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key `{twice}` occurs twice in one object")
    return found


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
            if twice := next(_repeated(file.schema_arrow), None):
                raise DataError(
                    f"`{path}` has two columns with the name `{twice}`",
                    hint="rename one of them, with pyarrow: `table.rename_columns([...])`",
                )
            chosen = _chosen(file.schema_arrow.names, columns)
            batches = file.iter_batches(batch_size=BLOCK_ROWS, columns=chosen)
            yield from blocks_of(batches, lambda number: f"`{path}` row {number}", most)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, columns, error) from error


def _repeated(fields: Any, parent: str = "") -> Iterator[str]:
    """Yield the names that several Arrow fields share, also inside of other fields. A row as a mapping would lose
    all but the last of their values."""
    from pyarrow import types

    names = [f"{parent}{field.name}" for field in fields]
    for field, name in zip(fields, names, strict=True):
        if names.count(name) > 1:
            yield name
        inner = field.type
        while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
            inner = inner.value_type
        if types.is_struct(inner):
            yield from _repeated(list(inner), f"{name}.")


def _unreadable(path: Path, columns: Collection[str] | None, error: Exception) -> DataError:
    """Return the error for a file that cannot be read. It names the columns whose types pyarrow cannot read."""
    import pyarrow
    import pyarrow.parquet

    faults = list[str]()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for name in _chosen(file.schema_arrow.names, columns) or file.schema_arrow.names:
                try:
                    list(blocks_of(file.iter_batches(BLOCK_ROWS, columns=[name]), str, None))
                except pyarrow.ArrowException as why:
                    faults.append(f"column `{name}` has the type `{file.schema_arrow.field(name).type}`: {why}")
    except (pyarrow.ArrowException, OSError):
        faults = []
    if not faults:
        return DataError(f"`{path}` cannot be read as parquet: {error}", hint="is the file complete?")
    return DataError(
        f"`{path}` cannot be read: {'; '.join(faults)}", hint="store the column as text or as a list, or remove it"
    )


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
        part = _decoded(batch if most is None else batch.slice(0, most - done))
        if not part.num_rows:
            continue
        codes = _joined([_codes(column) for column in part.columns] or [numpy.arange(part.num_rows)])
        _, first, order = numpy.unique(codes, return_index=True, return_inverse=True)
        rows = part.take(first).to_pylist()
        places = [place(done + int(number) + 1) for number in first]
        yield Block(list(zip(places, rows, strict=True)), order.tolist(), null_is_absent=True)
        done += part.num_rows
        if most is not None and done >= most:
            return


def _decoded(batch: Any) -> Any:
    """Return a record batch whose columns have the same values in types that `take` and `_codes` know: categories
    (pandas and polars) become their values, and views (polars) become text and bytes."""
    import pyarrow

    for field in batch.schema:
        # pandas stores only a number for a period. Arrow knows this type only if pandas is imported.
        named = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
        if "pandas.period" in (named, getattr(field.type, "extension_name", "")):
            raise pyarrow.ArrowNotImplementedError("a period of pandas is stored as a number")
    types = [_decoded_type(field.type) for field in batch.schema]
    if types == [field.type for field in batch.schema]:
        return batch
    columns = [column.cast(type) for column, type in zip(batch.columns, types, strict=True)]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _decoded_type(type: Any) -> Any:
    import pyarrow
    from pyarrow import types

    def inner(field: Any) -> Any:
        return field.with_type(_decoded_type(field.type))

    if types.is_dictionary(type):
        return _decoded_type(type.value_type)
    if types.is_string_view(type):
        return pyarrow.large_string()
    if types.is_binary_view(type):
        return pyarrow.large_binary()
    if types.is_struct(type):
        return pyarrow.struct([inner(field) for field in type])
    if types.is_list(type):
        return pyarrow.list_(inner(type.value_field))
    if types.is_large_list(type):
        return pyarrow.large_list(inner(type.value_field))
    if types.is_fixed_size_list(type):
        return pyarrow.list_(inner(type.value_field), type.list_size)
    if types.is_map(type):
        return pyarrow.map_(inner(type.key_field), inner(type.item_field))
    return type


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
