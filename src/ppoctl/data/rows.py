"""Datasets as rows: a question, an answer, and an id that stays the same for as long as the question does.

Nothing is dropped, cut or guessed: the first row that does not fit is an error. Imports no torch, so that `validate`
reads the data on a login node.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ppoctl.batch.prompts import Json, Message
from ppoctl.data.tables import Place, columns_of, existing, lookup, read_jsonl, read_parquet
from ppoctl.errors import DataError, RecipeError
from ppoctl.recipe.schema import ColumnRows, DataTable, Gsm8kRows

_GSM8K_MARK = "####"
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of chat messages."""


@dataclass(frozen=True)
class Row:
    """One question and what the dataset knows of its answer."""

    id: str
    """NAME/INDEX-DIGEST: dataset, position from 0, and a digest of the question, so that an edit is noticed."""
    question: str | tuple[Message, ...]
    answer: str | None
    place: Place
    """Place of the row in its file, for error messages."""
    fields: Mapping[str, Json] = field(default_factory=dict)
    """Further columns that the recipe names."""


def read_datasets(data: DataTable) -> dict[str, list[Row]]:
    """Rows of all datasets of a recipe by key: `train`, `eval.NAME`. Raises what `stream_rows` raises."""
    tables: dict[str, Gsm8kRows | ColumnRows] = {"train": data.train}
    tables.update({f"eval.{name}": table for name, table in data.eval.items()})
    return {name: read_rows(table, name=name) for name, table in tables.items()}


def read_rows(table: Gsm8kRows | ColumnRows, *, name: str) -> list[Row]:
    """Rows of one dataset, in file order. Raises what `stream_rows` raises."""
    return list(stream_rows(table, name=name))


def stream_rows(table: Gsm8kRows | ColumnRows, *, name: str) -> Iterator[Row]:
    """Rows of one dataset, one at a time, in file order. `name` is its key below `data`.

    Raises MissingAssetError where there is no file, RecipeError on one of another format, and DataError on a file
    that is unreadable or empty, and on the first row without the columns asked for, or with something in them that is
    no question or answer.
    """
    key = f"data.{name}"
    path = existing(table.path, key=f"{key}.path")
    prompt_column, answer_column, further = _columns(table)
    number = 0
    for place, raw in islice(_raw_rows(table, path, key), table.max_rows):
        question = _question(_value(raw, prompt_column, place, key), prompt_column, place)
        answer = None
        if answer_column is not None:
            answer = _answer(_value(raw, answer_column, place, key), answer_column, place)
        if isinstance(table, Gsm8kRows) and _GSM8K_MARK not in (answer or ""):
            raise DataError(
                f"{place}: `answer` does not end in `{_GSM8K_MARK} N`",
                hint=f'answers that are bare numbers are read with `format = "columns"` in [{key}]',
            )
        fields = {column: _field(_value(raw, column, place, key), column, place) for column in further}
        yield Row(_row_id(name, number, question), question, answer, place, fields)
        number += 1
    if not number:
        raise DataError(f"`{key}.path` is `{path}`: the file has no rows", hint=f"--set {key}.path=FILE")


def require_enough(rows: int, prompts_per_step: int) -> None:
    """Raises DataError when one step takes more prompts than the training set has."""
    if rows < prompts_per_step:
        raise DataError(
            f"`data.train` has {rows} rows, and a step takes {prompts_per_step} (`rollout.prompts_per_step`)",
            hint=f"--set rollout.prompts_per_step={rows}, or use more rows (`data.train.max_rows`); for more "
            "responses to the same prompts raise `rollout.samples_per_prompt`",
        )


def digest_of(rows: Sequence[Row]) -> str:
    """SHA-256 of ids, questions, answers and further columns, in order, by which `run.json` remembers a dataset."""
    digest = hashlib.sha256()
    for row in rows:
        told = [row.id, _canonical(row.question), row.answer, *([dict(row.fields)] if row.fields else [])]
        digest.update(json.dumps(told, sort_keys=True).encode())
    return digest.hexdigest()


def _columns(table: Gsm8kRows | ColumnRows) -> tuple[str, str | None, tuple[str, ...]]:
    """Where the question, its ground truth and what else is wanted stand."""
    if isinstance(table, Gsm8kRows):
        return "question", "answer", ()
    return table.prompt, table.answer, table.fields


def _raw_rows(table: Gsm8kRows | ColumnRows, path: Path, key: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    if path.suffix == ".parquet" and isinstance(table, ColumnRows):
        return read_parquet(path)
    readable = "`.jsonl`" if isinstance(table, Gsm8kRows) else "`.jsonl` or `.parquet`"
    raise RecipeError(
        f"`{key}.path` is `{path}`: must end in {readable}",
        hint='`format = "columns"` with `prompt` and `answer` reads .jsonl and .parquet',
    )


def _value(raw: Mapping[str, Any], column: str, place: Place, key: str) -> Any:
    try:
        return lookup(raw, column)
    except KeyError:
        there = ", ".join(f"`{name}`" for name in columns_of(raw)) or "none"
        raise DataError(
            f"{place} has no column `{column}`; its columns are {there}",
            hint=f'map them in [{key}]: `format = "columns"`, `prompt = "COLUMN"`, `answer = "COLUMN"`',
        ) from None


def _question(value: Any, column: str, place: Place) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return _text(value, column, place)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{place}: `{column}` is {_kind(value)}, and a prompt is a text or a list of chat messages",
            hint="name the column with the question as `prompt`",
        )
    messages: list[Message] = []
    for item in value:
        role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{place}: message {len(messages) + 1} in `{column}` is not a `role` and a `content` of text",
                hint='chat messages look like {"role": "user", "content": "..."}',
            )
        if role not in ROLES:
            raise DataError(
                f"{place}: message {len(messages) + 1} in `{column}` has the role `{role}`",
                hint=f"roles are {', '.join(ROLES)}",
            )
        messages.append(Message(role, _text(content, column, place)))
    if messages[-1].role == "assistant":
        raise DataError(
            f"{place}: the last message in `{column}` is the assistant's, so there is nothing left to answer",
            hint="leave out the model answer",
        )
    return tuple(messages)


def _answer(value: Any, column: str, place: Place) -> str:
    # bool is an int, and `True` is hardly a ground truth anyone would write. A float has no one spelling.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{place}: `{column}` is {_kind(value)}, and an answer is a text or a whole number",
            hint="name the column with the ground truth as `answer`",
        )
    return _text(value, column, place)


def _field(value: Any, column: str, place: Place) -> Json:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place}: `{column}` is {_kind(value)}, and what a reward is given must be JSON: {error}",
            hint="leave it out of `fields`, or write it as text",
        ) from error
    found: Json = value
    return found


def _text(value: str, column: str, place: Place) -> str:
    if not value.strip():
        raise DataError(f"{place}: `{column}` is empty", hint="remove the row, or name another column")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: `{column}` holds half a character at {error.start} (a lone surrogate)", hint="mend the row"
        ) from error
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"`{str(value)[:40]}` (a {type(value).__name__})"


def _row_id(name: str, index: int, question: str | tuple[Message, ...]) -> str:
    digest = hashlib.sha256(json.dumps(_canonical(question)).encode()).hexdigest()
    return f"{name.replace('.', '/')}/{index:06d}-{digest[:8]}"


def _canonical(question: str | tuple[Message, ...]) -> str | list[list[str]]:
    return question if isinstance(question, str) else [[message.role, message.content] for message in question]
