"""Rows of data sets: a question, an answer, and an id that changes only if the question or its position changes.

Rows are never dropped, truncated or guessed: an invalid row is an error. The module imports no torch, so that
`validate` can read the data on a login node.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ppoctl.core.batch.prompts import Json, Message, as_lists
from ppoctl.core.errors import DataError, RecipeError
from ppoctl.data import loaders
from ppoctl.data.formats import Question, RowOrigin, columns_read, parse_row
from ppoctl.data.row_blocks import Block, Place, read_jsonl, read_parquet
from ppoctl.data.row_faults import RowFaults
from ppoctl.data.row_files import PARQUET, files_of, in_an_epoch
from ppoctl.data.row_tables import AnyRows, DataTable, Gsm8kRows, MixRows, PythonRows, SingleTable, sources_of


@dataclass(frozen=True)
class DatasetRow:
    """One question with its ground truth and further fields."""

    id: str
    """NAME/INDEX-DIGEST: name of the data set, position from 0, and a digest of the question, which reveals edits."""
    question: Question
    answer: str | None
    place: Place
    """Place of the row in its file, for error messages."""
    fields: Mapping[str, Json] = field(default_factory=dict)
    """Further columns that the recipe names."""


@dataclass(eq=False)
class Content:
    """Content of equal rows. Equal rows that are close to each other share one object."""

    question: Question
    answer: str | None
    fields: Mapping[str, Json]
    place: Place
    """Place of the first row with this content."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Columns that are not in the fields (`ParsedRow.left_out`)."""
    numbers: tuple[int, int, int] | None = None
    """Numbers that the module `index` assigned to the rows with this content."""

    @cached_property
    def canonical(self) -> str:
        """The question as JSON text. The digest is computed from this text."""
        return json.dumps(canonical(self.question))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the question."""
        return hashlib.sha256(self.canonical.encode()).digest()

    @cached_property
    def id_end(self) -> str:
        """Suffix of the ids of the rows with this content, after the position."""
        return f"-{self.digest[:4].hex()}"

    @cached_property
    def digest_input(self) -> str:
        """Text that follows the id of a row in the input of the data set's digest."""
        further = f", {json.dumps(dict(self.fields), sort_keys=True)}" if self.fields else ""
        return f'", {self.canonical}, {json.dumps(self.answer)}{further}]'


def canonical(question: Question) -> str | list[list[Json]]:
    """Return a question as JSON values."""
    return question if isinstance(question, str) else as_lists(question)


def question_of(written: str | list[list[Any]]) -> Question:
    """Return the question from the result of `canonical`."""
    return written if isinstance(written, str) else tuple(Message(*parts) for parts in written)


def tables_of(data: DataTable) -> dict[str, AnyRows]:
    """Return key below `data` (`train`, `eval.NAME`) -> table of rows."""
    return {"train": data.train, **{f"eval.{name}": table for name, table in data.eval.items()}}


def single_tables(table: AnyRows, *, name: str) -> dict[str, tuple[str, SingleTable]]:
    """Return source -> (name of the source's rows, table of the source) for each source of a table."""
    inside = f"{name}.sources." if isinstance(table, MixRows) else name
    return {source: (f"{inside}{source}", single) for source, single in sources_of(table).items()}


def read_rows(table: SingleTable, *, name: str) -> list[DatasetRow]:
    """Return the rows of one data set, in file order. Raises the errors of `stream_rows`."""
    return list(stream_rows(table, name=name))


def stream_rows(table: SingleTable, *, name: str) -> Iterator[DatasetRow]:
    """Yield the rows of one data set, in file order. `name` is the key of the data set below `data`.

    Raises MissingFileError if a file is missing, RecipeError if a file has another format, and DataError if a file
    is unreadable or empty. At the end, raises DataError for all rows that lack a column, or in which a value is not a
    question or an answer.
    """
    begin, faults = id_begin(name), RowFaults()
    for number, content in enumerate(stream_contents(table, faults, name=name)):
        if content is not None:
            id = f"{begin}{number:06d}{content.id_end}"
            yield DatasetRow(id, content.question, content.answer, content.place, content.fields)
    faults.require_none()


def stream_contents(table: SingleTable, faults: RowFaults, *, name: str) -> Iterator[Content | None]:
    """Yield the content of each row of `stream_rows`; None: the row is invalid, and its error is added to `faults`.
    Equal rows that are close to each other share one object."""
    key, number = f"data.{name}", 0
    for block in _blocks(table, key):
        contents = list[Content | DataError]()
        for place, raw in block.rows:
            try:
                if isinstance(raw, DataError):
                    raise raw
                parsed = parse_row(raw, RowOrigin(place, table, key, block.null_is_absent))
                contents.append(Content(parsed.question, parsed.answer, parsed.fields, place, parsed.left_out))
            except DataError as error:
                contents.append(error)
        for code in block.order:
            content = contents[code]
            if isinstance(content, DataError):
                faults.add(content, block.rows[code][0])
            yield None if isinstance(content, DataError) else content
        number += len(block.order)
    if not number:
        raise DataError(f"[{key}] has no rows: `{table.named}` is empty", hint=f"--set {key}.path=FILE")


def id_begin(name: str) -> str:
    """Return the prefix of the row ids of a data set, before the position."""
    return f"{name.replace('.sources.', '/').replace('.', '/')}/"


_TAKES = {"rollout.prompts_per_step": "step", "rollout.groups.round_prompts": "round of generation"}


def require_enough(rows: int, at_least: int, key: str = "rollout.prompts_per_step") -> None:
    """Raise DataError if one round of generation uses more prompts than the training set has. `key` sets the number
    of prompts of a round."""
    if rows < at_least:
        raise DataError(
            f"`data.train` has {rows} rows, but a {_TAKES[key]} takes {at_least} (`{key}`)",
            hint=f"--set {key}={rows}, or use more rows (`data.train.max_rows`); for more "
            "responses to the same prompts raise `rollout.samples_per_prompt`",
        )


def require_in_an_epoch(name: str, rows: int, weight: float) -> None:
    """Raise DataError if the weight of a source is so small that no epoch contains a row of the source."""
    if in_an_epoch(rows, weight) == 0:
        raise DataError(
            f"none of the {rows} rows of `data.{name}` is in an epoch: its weight is `{weight:g}`",
            hint=f"--set data.{name}.weight={1 / rows:.3g}  # one row in each epoch; or remove the source",
        )


def _blocks(table: SingleTable, key: str) -> Iterator[Block]:
    """Yield the first `max_rows` rows of a table, in the form in which they are stored."""
    remaining = table.max_rows
    for read in _readers(table, key):
        for block in read(remaining):
            order = block.order if remaining is None else block.order[:remaining]
            yield block._replace(order=order)
            if remaining is not None:
                remaining -= len(order)
                if not remaining:
                    return


def _readers(table: SingleTable, key: str) -> "Iterator[loaders.Reader]":
    """Yield a reader for each file of the table."""
    if isinstance(table, PythonRows):
        yield partial(loaders.read_python, table, key=key)
        return
    columns = columns_read(table)
    if table.dataset is not None:
        yield partial(loaders.read_dataset, table.dataset, columns, key=key)
        return
    files = files_of(table, key=key)
    for file in files:
        if isinstance(table, Gsm8kRows) and file.suffix == PARQUET:
            raise RecipeError(
                f"`{key}.path` is `{file}`: must end in `.jsonl`",
                hint='`format = "columns"` with `prompt` and `answer` reads .jsonl and .parquet',
            )
    for file in files:
        yield partial(_read_file, file, columns)


def _read_file(file: Path, columns: tuple[str, ...] | None, most: int | None) -> Iterator[Block]:
    return read_parquet(file, columns, most) if file.suffix == PARQUET else read_jsonl(file)
