"""Datasets as rows: a question, an answer, and an id that stays the same for as long as the question does.

Nothing is dropped, cut or guessed here: the first row that does not fit is an error. Imports no torch, so that
`validate` reads the data on a login node.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from ppoctl.batch.prompts import Json, Message
from ppoctl.data import loaders
from ppoctl.data.formats import Question, columns_read, parse_row
from ppoctl.data.row_blocks import Block, Place, read_jsonl, read_parquet
from ppoctl.errors import DataError, RecipeError
from ppoctl.recipe.row_files import PARQUET, files_of, in_an_epoch
from ppoctl.recipe.rows import AnyRows, DataTable, Gsm8kRows, MixRows, PythonRows, SingleTable, sources_of


@dataclass(frozen=True)
class DatasetRow:
    """One question and what the dataset knows of its answer."""

    id: str
    """NAME/INDEX-DIGEST: dataset, position from 0, and a digest of the question, so that an edit is noticed."""
    question: Question
    answer: str | None
    place: Place
    """Place of the row in its file, for error messages."""
    fields: Mapping[str, Json] = field(default_factory=dict)
    """Further columns that the recipe names."""


@dataclass(eq=False)
class Content:
    """What equal rows have in common: one object for those of them that stand near each other."""

    question: Question
    answer: str | None
    fields: Mapping[str, Json]
    place: Place
    """Place of the first of them."""
    numbers: tuple[int, int, int] | None = None
    """Numbers that an index gave them (`index`)."""

    @cached_property
    def canonical(self) -> str:
        """The question as JSON, of which its digest is made."""
        return json.dumps(canonical(self.question))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the question."""
        return hashlib.sha256(self.canonical.encode()).digest()

    @cached_property
    def id_end(self) -> str:
        """What stands behind the position in the ids of these rows."""
        return f"-{self.digest[:4].hex()}"

    @cached_property
    def digest_input(self) -> str:
        """What the digest of a dataset takes of a row, behind its id."""
        further = f", {json.dumps(dict(self.fields), sort_keys=True)}" if self.fields else ""
        return f'", {self.canonical}, {json.dumps(self.answer)}{further}]'


def canonical(question: Question) -> str | list[list[str]]:
    """A question as JSON has it."""
    return question if isinstance(question, str) else [[message.role, message.content] for message in question]


def question_of(written: str | list[list[str]]) -> Question:
    """The question of which `canonical` made this."""
    return written if isinstance(written, str) else tuple(Message(role, content) for role, content in written)


def tables_of(data: DataTable) -> dict[str, AnyRows]:
    """Tables of a recipe's rows by key: `train`, `eval.NAME`."""
    return {"train": data.train, **{f"eval.{name}": table for name, table in data.eval.items()}}


def single_tables(table: AnyRows, *, name: str) -> dict[str, tuple[str, SingleTable]]:
    """The name of the rows and the table of each source of a table, by the name of the source."""
    inside = f"{name}.sources." if isinstance(table, MixRows) else name
    return {source: (f"{inside}{source}", single) for source, single in sources_of(table).items()}


def read_rows(table: SingleTable, *, name: str) -> list[DatasetRow]:
    """Rows of one dataset, in file order. Raises what `stream_rows` raises."""
    return list(stream_rows(table, name=name))


def stream_rows(table: SingleTable, *, name: str) -> Iterator[DatasetRow]:
    """Rows of one dataset, one at a time, in file order. `name` is its key below `data`.

    Raises MissingAssetError where there is no file, RecipeError on one of another format, and DataError on a file
    that is unreadable or empty, and on the first row without the columns asked for, or with something in them that is
    no question or answer.
    """
    begin = id_begin(name)
    for number, content in enumerate(stream_contents(table, name=name)):
        id = f"{begin}{number:06d}{content.id_end}"
        yield DatasetRow(id, content.question, content.answer, content.place, content.fields)


def stream_contents(table: SingleTable, *, name: str) -> Iterator[Content]:
    """What the rows of `stream_rows` say, in order; rows that are equal and near each other are one object."""
    key, number = f"data.{name}", 0
    for block in _blocks(table, key):
        found = [Content(*_with_place(raw, place, table, key)) for place, raw in block.rows]
        yield from (found[code] for code in block.order)
        number += len(block.order)
    if not number:
        raise DataError(f"[{key}] has no rows: `{table.named}` holds none", hint=f"--set {key}.path=FILE")


def id_begin(name: str) -> str:
    """What stands in front of the position in the ids of a dataset's rows."""
    return f"{name.replace('.sources.', '/').replace('.', '/')}/"


def require_enough(rows: int, prompts_per_step: int) -> None:
    """Raises DataError when one step takes more prompts than the training set has."""
    if rows < prompts_per_step:
        raise DataError(
            f"`data.train` has {rows} rows, and a step takes {prompts_per_step} (`rollout.prompts_per_step`)",
            hint=f"--set rollout.prompts_per_step={rows}, or use more rows (`data.train.max_rows`); for more "
            "responses to the same prompts raise `rollout.samples_per_prompt`",
        )


def require_in_an_epoch(name: str, rows: int, weight: float) -> None:
    """Raises DataError where the weight of a source leaves none of its rows in an epoch, and so in a whole run."""
    if in_an_epoch(rows, weight) == 0:
        raise DataError(
            f"none of the {rows} rows of `data.{name}` comes in an epoch: its weight is `{weight:g}`",
            hint=f"--set data.{name}.weight={1 / rows:.3g}  # one row in each epoch; or remove the source",
        )


def _with_place(
    raw: Mapping[str, Json], place: Place, table: SingleTable, key: str
) -> tuple[Question, str | None, Mapping[str, Json], Place]:
    return (*parse_row(raw, place, table, key), place)


def _blocks(table: SingleTable, key: str) -> Iterator[Block]:
    """The first `max_rows` rows of a table, as they are stored."""
    left = table.max_rows
    for read in _readers(table, key):
        for block in read(left):
            order = block.order if left is None else block.order[:left]
            yield Block(block.rows, order)
            if left is not None:
                left -= len(order)
                if not left:
                    return


def _readers(table: SingleTable, key: str) -> "Iterator[loaders.Reader]":
    """A reader of each of the table's files, one after the other."""
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
