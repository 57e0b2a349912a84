"""Rows that no file of ours holds: of the library `datasets`, and of a function of the user's own."""

import hashlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ppoctl.data.row_blocks import BLOCK_ROWS, Block, blocks_of
from ppoctl.errors import DataError, EnvironmentProblemError, MissingAssetError, PpoctlError, RecipeError, quoted
from ppoctl.recipe.rows import DatasetTable, PythonRows

Reader = Callable[[int | None], Iterator[Block]]
"""Function that gives the first so many rows; None: all."""


def read_dataset(
    table: DatasetTable, columns: Collection[str] | None, most: int | None, *, key: str
) -> Iterator[Block]:
    """The first `most` rows of a data set, with these columns; None: all. Raises MissingAssetError where the library
    finds no such data set, here or on the hub, EnvironmentProblemError where it is not installed."""
    found = load_dataset(table, key)
    there = list(found.column_names)
    heads = set(there) if columns is None else {column.partition(".")[0] for column in columns}
    if heads <= set(there):
        found = found.select_columns([name for name in there if name in heads])
    arrow = found.with_format("arrow")
    batches = (batch for part in arrow.iter(BLOCK_ROWS) for batch in part.combine_chunks().to_batches())
    yield from blocks_of(batches, lambda number: f"`{table.path}` ({table.split}) row {number}", most)


def load_dataset(table: DatasetTable, key: str) -> Any:
    """The library's own object of a split, fetched where it is not in its cache. Raises as `read_dataset` does."""
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentProblemError(
            f"`{key}.dataset` is `{table.path}`, and `datasets` is not installed", hint="pip install datasets"
        ) from error
    folder = Path(table.path)
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        if folder.is_dir() and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            kept = datasets.load_from_disk(table.path)
            return kept[table.split] if isinstance(kept, datasets.DatasetDict) else kept
        return datasets.load_dataset(table.path, table.name, split=table.split)
    except Exception as error:  # the library's own, of the network, of the disk: all end the same way
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        where = quoted(table.path)
        hint = f"ls {where}" if folder.is_absolute() else f"hf download --repo-type dataset {where}"
        raise MissingAssetError(
            f"`{key}.dataset.path` is `{table.path}` (split `{table.split}`): it cannot be had: {first}", hint=hint
        ) from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def read_python(table: PythonRows, most: int | None, *, key: str) -> Iterator[Block]:
    """The first `most` rows of a function of the user's own. Raises MissingAssetError where its file is not there,
    RecipeError where it has no such function, DataError on what is no row and with what the function raises."""
    del most  # the next row is not asked for before it is wanted
    function, number = _function(table.function, key), 0
    try:
        for number, row in enumerate(function(**table.options), start=1):
            place = f"`{table.function}` row {number}"
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{place} is a {type(row).__name__}, and a row is a mapping with `prompt`",
                    hint='yield {"prompt": "...", "answer": "..."}',
                )
            yield Block(((place, dict(row)),), (0,))
    except PpoctlError:
        raise
    except Exception as error:  # whatever a person's code raises
        raise DataError(
            f"`{key}.function` is `{table.function}`, which failed after {number} rows: "
            f"{type(error).__name__}: {error}",
            hint=f"${{EDITOR:-vi}} {quoted(_file(table.function))}",
        ) from error


def code_digest(table: PythonRows, *, key: str) -> str:
    """SHA-256 of the file of the function. Raises MissingAssetError where it is not there."""
    return hashlib.sha256(_read(table.function, key)).hexdigest()


def _file(function: str) -> Path:
    return Path(function.rpartition(":")[0])


def _read(function: str, key: str) -> bytes:
    file, colon, name = function.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        raise RecipeError(
            f"`{key}.function` is `{function}`, and a function is named as `path.py:name`",
            hint=f"--set {key}.function=rows.py:rows",
        )
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise MissingAssetError(
            f"`{key}.function` is `{function}`: `{file}` cannot be read: {str(error.strerror).lower()}",
            hint=f"ls -l {quoted(Path(file).parent)}",
        ) from error


def _function(function: str, key: str) -> Callable[..., Any]:
    module = _module(str(_file(function)), hashlib.sha256(_read(function, key)).hexdigest(), key)
    name = function.rpartition(":")[2]
    found = getattr(module, name, None)
    if not callable(found):
        raise RecipeError(
            f"`{key}.function` is `{function}`, and the file has no function `{name}`",
            hint=f"grep -n 'def ' {quoted(_file(function))}",
        )
    return found  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _module(file: str, digest: str, key: str) -> Any:
    """The module of a file with these bytes, run once."""
    spec = importlib.util.spec_from_file_location(f"ppoctl_rows_{digest[:12]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a person's code raises
        raise RecipeError(
            f"`{key}.function` is in `{file}`, which cannot be imported: {type(error).__name__}: {error}",
            hint=f"python {quoted(file)}",
        ) from error
    return module
