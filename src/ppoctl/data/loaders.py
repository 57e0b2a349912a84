"""Rows that are not in a JSONL or parquet file. They come from the library `datasets`, or from a user's function."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ppoctl.core.errors import DataError, EnvironmentProblemError, MissingFileError, PpoctlError, RecipeError, quoted
from ppoctl.core.user_functions import described, import_command, imported
from ppoctl.data.row_blocks import BLOCK_ROWS, Block, blocks_of
from ppoctl.data.row_tables import DatasetTable, PythonRows

Reader = Callable[[int | None], Iterator[Block]]
"""Function that yields the first N rows; None: all rows."""


def read_dataset(
    table: DatasetTable, columns: Collection[str] | None, most: int | None, *, key: str
) -> Iterator[Block]:
    """Yield the first `most` rows of a data set (None: all rows), with these columns (None: all columns).

    Raises MissingFileError if `datasets` finds the data set neither on this machine nor on the hub. Raises
    EnvironmentProblemError if the library `datasets` is not installed.
    """
    dataset = load_dataset(table, key)
    available = list(dataset.column_names)
    heads = set(available) if columns is None else {column.partition(".")[0] for column in columns}
    if heads <= set(available):
        dataset = dataset.select_columns([name for name in available if name in heads])
    arrow = dataset.with_format("arrow")
    batches = (batch for part in arrow.iter(BLOCK_ROWS) for batch in part.combine_chunks().to_batches())
    yield from blocks_of(batches, lambda number: f"`{table.path}` ({table.split}) row {number}", most)


def load_dataset(table: DatasetTable, key: str) -> Any:
    """Return a split of a data set as an object of `datasets`. The data set is downloaded if it is not in the cache.

    Raises the errors of `read_dataset`.
    """
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentProblemError(
            f"`{key}.dataset` is `{table.path}`, but `datasets` is not installed", hint="pip install datasets"
        ) from error
    folder = Path(table.path)
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        if folder.is_dir() and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            stored = datasets.load_from_disk(table.path)
            return stored[table.split] if isinstance(stored, datasets.DatasetDict) else stored
        return datasets.load_dataset(table.path, table.name, split=table.split)
    except Exception as error:  # errors of the library, the network and the disk are handled alike
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        where = quoted(table.path)
        hint = f"ls {where}" if folder.is_absolute() else f"hf download --repo-type dataset {where}"
        raise MissingFileError(
            f"`{key}.dataset.path` is `{table.path}` (split `{table.split}`): it cannot be loaded: {first}", hint=hint
        ) from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def read_python(table: PythonRows, most: int | None, *, key: str) -> Iterator[Block]:
    """Yield the rows of a user's function, one by one. The caller stops after the rows that it requires.

    Raises MissingFileError if the file is missing, and RecipeError if the file has no such function. Raises
    DataError if the function raises an error or yields something that is not a row.
    """
    del most  # the function is a Python generator, which runs only as far as its rows are read
    function, number = _function(table, key), 0
    try:
        for number, row in enumerate(function(**table.options), start=1):
            place = f"`{table.function}` row {number}"
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{place} is a {type(row).__name__}, but a row must be a mapping with `prompt`",
                    hint='yield {"prompt": "...", "answer": "..."}',
                )
            yield Block(((place, _plain(row)),), (0,))
    except PpoctlError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise any error
        raise DataError(
            f"`{key}.function` is `{table.function}`, which failed after {number} rows: "
            f"{described(error, table.function, caller=__file__)}",
            hint=f"${{EDITOR:-vi}} {quoted(table.function.rpartition(':')[0])}",
        ) from error


def _plain(value: Any) -> Any:
    """Return a value with the numbers, texts and arrays of numpy, torch and pyarrow as Python's own."""
    if hasattr(value, "as_py"):
        return _plain(value.as_py())
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def code_digest(table: PythonRows, *, key: str) -> str:
    """Return the SHA-256 of the file that contains the function. The rows are in another digest, so files that the
    function imports or reads need not be in this one. Raises MissingFileError if the file is missing."""
    function = table.function
    file, colon, name = function.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        raise RecipeError(
            f"`{key}.function` is `{function}`, but a function is written as `path.py:name`",
            hint=f"--set {key}.function=rows.py:rows",
        )
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise MissingFileError(
            f"`{key}.function` is `{function}`: `{file}` cannot be read: {str(error.strerror).lower()}",
            hint=f"ls -l {quoted(Path(file).parent)}",
        ) from error


def _function(table: PythonRows, key: str) -> Callable[..., Any]:
    code_digest(table, key=key)  # raises if there is no file
    function = table.function
    try:
        return imported(function)
    except (Exception, SystemExit) as error:  # user code may raise any error
        raise RecipeError(
            f"`{key}.function` is `{function}`: it cannot be imported: {described(error, function, caller=__file__)}",
            hint=import_command(function),
        ) from error
