"""Parse raw rows of each format into question, ground truth and further fields.

The parsers never guess: a row that does not match its format raises an error that names the place of the row.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from ppoctl.core.batch.prompts import Json, Message
from ppoctl.core.errors import DataError
from ppoctl.data.messages import message_of, require_characters, text_of
from ppoctl.data.row_blocks import Place, columns_of, lookup
from ppoctl.data.row_tables import ColumnRows, DialogueRows, Gsm8kRows, PythonRows, SingleTable, VerlRows

_GSM8K_MARK = "####"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}

Question = str | tuple[Message, ...]


@dataclass(frozen=True)
class ParsedRow:
    """Question, ground truth and further fields of a row."""

    question: Question
    answer: str | None
    fields: Mapping[str, Json]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Column -> what of its value the fields lack, as the end of a sentence: all, because it is not JSON, and the
    recipe does not name the column; or all turns of a dialogue after an answer."""


@dataclass(frozen=True)
class RowOrigin:
    """Place of a row and the table that reads it. `key` is the dotted key of the table."""

    place: Place
    table: SingleTable
    key: str
    null_is_absent: bool = False
    """Whether a mapping has null for each key that it lacks, as in Arrow."""


@dataclass(frozen=True)
class _Columns:
    """Names of the columns that contain the question and the ground truth."""

    prompt: str
    answer: str | None
    needs_answer: bool = True
    """Whether a row without the answer column is an error."""


def columns_read(table: SingleTable) -> tuple[str, ...] | None:
    """Return the names of the columns that a table reads, nested columns with dots; None: all columns."""
    if table.fields is None:
        return None
    if isinstance(table, DialogueRows):
        return ("chosen", "rejected", *table.fields)
    columns = _columns(table)
    # If the ground truth is optional, only the rows show whether the column of the ground truth exists.
    if not columns.needs_answer:
        return None
    return (columns.prompt, *([columns.answer] if columns.answer else []), *table.fields)


def parse_row(raw: Mapping[str, Any], source: RowOrigin) -> ParsedRow:
    """Return question, ground truth and further fields of a raw row.

    Raises DataError if a column is missing, or if a value is not a question, an answer or JSON.
    """
    place, table, key = source.place, source.table, source.key
    if isinstance(table, DialogueRows):
        chat, responses, later = _dialogue(raw, source)
        fields, left_out = _fields(raw, source, ("chosen", "rejected"))
        return ParsedRow(chat, None, {**responses, **fields}, {**later, **left_out})
    columns = _columns(table)
    question = _question(_value(raw, columns.prompt, source), columns.prompt, source)
    answer = _truth(raw, columns, source)
    if isinstance(table, Gsm8kRows) and _GSM8K_MARK not in (answer or ""):
        raise DataError(
            f"{place}: `answer` does not end in `{_GSM8K_MARK} N`",
            hint=f'to read answers that are only a number, set `format = "columns"` in [{key}]',
        )
    used = (columns.prompt, *([columns.answer] if columns.answer else []))
    return ParsedRow(question, answer, *_fields(raw, source, used))


def _columns(table: SingleTable) -> _Columns:
    if isinstance(table, Gsm8kRows):
        return _Columns("question", "answer")
    if isinstance(table, VerlRows):
        return _Columns("prompt", "reward_model.ground_truth", needs_answer=False)
    if isinstance(table, PythonRows):
        return _Columns("prompt", "answer", needs_answer=False)
    assert isinstance(table, ColumnRows)
    return _Columns(table.prompt, table.answer)


def _truth(raw: Mapping[str, Any], columns: _Columns, source: RowOrigin) -> str | None:
    if columns.answer is None:
        return None
    try:
        answer = lookup(raw, columns.answer)
    except KeyError:
        answer = None
        if columns.needs_answer:
            _value(raw, columns.answer, source)
    if answer is None and not columns.needs_answer:
        return None
    return _answer(answer, columns.answer, source)


def _fields(
    raw: Mapping[str, Any], source: RowOrigin, used: tuple[str, ...]
) -> tuple[dict[str, Json], Mapping[str, str]]:
    """Return the fields, and the columns that are left out because they are not JSON."""
    named, left_out = source.table.fields, dict[str, str]()
    try:
        if named is not None:
            return {column: _field(_value(raw, column, source), column, source) for column in named}, left_out
        rest: Mapping[str, Any] = raw
        for column in used:
            rest = _without(rest, column)
        return _as_json(rest, "", left_out), left_out
    except _HalfCharacterError as error:
        require_characters(error.text, f"{source.place}: {error.what}")
        raise


def _without(raw: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return the row without this column, and without parents of the column that are empty without it."""
    head, _, rest = column.partition(".")
    name = column if column in raw else head
    kept = {other: value for other, value in raw.items() if other != name}
    if name != column and isinstance(raw.get(name), Mapping) and (inner := _without(raw[name], rest)):
        kept[name] = inner
    return kept


def _value(raw: Mapping[str, Any], column: str, source: RowOrigin) -> Any:
    try:
        return lookup(raw, column)
    except KeyError:
        available = ", ".join(f"`{name}`" for name in columns_of(raw)) or "none"
        raise DataError(
            f"{source.place} has no column `{column}`; its columns are {available}",
            hint=_column_hint(raw, column, source),
        ) from None


def _column_hint(raw: Mapping[str, Any], column: str, source: RowOrigin) -> str:
    if column in (source.table.fields or ()):
        return f"correct `{source.key}.fields`, which names `{column}`"
    if {"prompt", "reward_model"} <= raw.keys() and not isinstance(source.table, VerlRows):
        return f'these are verl\'s columns: write `format = "verl"` in [{source.key}], without `prompt` and `answer`'
    return f'map them in [{source.key}]: `format = "columns"`, `prompt = "COLUMN"`, `answer = "COLUMN"`'


def _question(value: Any, column: str, source: RowOrigin) -> Question:
    place = source.place
    if isinstance(value, str):
        return text_of(value, f"{place}: `{column}`")
    if not isinstance(value, list | tuple) or not value:
        other = isinstance(source.table, ColumnRows)
        raise DataError(
            f"{place}: `{column}` is {_kind(value)}, but a prompt must be text or a list of chat messages",
            hint=f"--set {source.key}.prompt=COLUMN  # the column of the question; or remove the row"
            if other
            else f"store `{column}` as text or as a list of chat messages, or remove the row",
        )
    messages = tuple(
        message_of(item, f"{place}: message {number} in `{column}`", null_is_absent=source.null_is_absent)
        for number, item in enumerate(value, start=1)
    )
    if messages[-1].role == "assistant":
        raise DataError(
            f"{place}: the last message in `{column}` is from the assistant, so there is nothing to answer",
            hint="remove the assistant's message",
        )
    return messages


def _dialogue(raw: Mapping[str, Any], source: RowOrigin) -> tuple[Question, dict[str, Json], dict[str, str]]:
    """Return the common beginning of two dialogues, up to the last turn of the user, and the answer of each. Return
    also which of them have later turns, as `ParsedRow.left_out`."""
    place = source.place
    turns = {column: _turns(_value(raw, column, source), column, source) for column in ("chosen", "rejected")}
    common = 0
    for chosen, rejected in zip(turns["chosen"], turns["rejected"], strict=False):
        if chosen != rejected:
            break
        common += 1
    chat = turns["chosen"][:common]
    while chat and chat[-1].role != "user":
        chat = chat[:-1]
    if not chat:
        raise DataError(
            f"{place}: `chosen` and `rejected` do not begin with the same user turn",
            hint="remove the row: the two dialogues must have the same beginning",
        )
    responses = dict[str, Json]()
    for column, turn in turns.items():
        answer = turn[len(chat)] if len(turn) > len(chat) else None
        if answer is None or answer.role != "assistant":
            raise DataError(
                f"{place}: `{column}` has no assistant turn after the common beginning", hint="remove the row"
            )
        if answer.further:
            raise DataError(
                f"{place}: the answer in `{column}` has `{next(iter(answer.further))}`, but the field `{column}` is "
                "only its `content`",
                hint="write all text of the answer in its `content`, or remove the row",
            )
        responses[column] = answer.content
    for message in chat:
        if not message.further:
            text_of(message.content or "", f"{place}: `chosen`")
    later = {column: " after the first answer" for column, turn in turns.items() if len(turn) > len(chat) + 1}
    return tuple(chat), responses, later


def _turns(value: Any, column: str, source: RowOrigin) -> list[Message]:
    """Return the turns of a dialogue. An assistant turn may be empty, as in HH-RLHF."""
    place = source.place
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [
            message_of(
                item,
                f"{place}: message {number} in `{column}`",
                null_is_absent=source.null_is_absent,
                may_be_empty=True,
            )
            for number, item in enumerate(value, start=1)
        ]
    if isinstance(value, str):
        before, *parts = _TURN.split("\n\n" + value.lstrip("\n"))
        if not before.strip() and parts:
            speakers, texts = parts[::2], parts[1::2]
            pairs = zip(speakers, texts, strict=True)
            return [Message(_SPEAKERS[speaker], text.strip()) for speaker, text in pairs]
    raise DataError(
        f"{place}: `{column}` is {_kind(value)}, but a dialogue must be text with `Human:` and `Assistant:`, or a "
        "list of chat messages",
        hint='for other rows, use `format = "columns"` or `format = "python"`',
    )


def _answer(value: Any, column: str, source: RowOrigin) -> str:
    # bool is a subclass of int, but not a plausible ground truth. A float is rejected, because its text is ambiguous.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return f"{value:.0f}"
    if not isinstance(value, str):
        other = isinstance(source.table, ColumnRows)
        column_hint = f"; for another column: --set {source.key}.answer=COLUMN" if other else ""
        raise DataError(
            f"{source.place}: `{column}` is {_kind(value)}, but an answer must be text or a whole number",
            hint=f"{_answer_hint(value)}{column_hint}",
        )
    return text_of(value, f"{source.place}: `{column}`")


def _answer_hint(value: Any) -> str:
    if value is None:
        return "remove the row"
    if isinstance(value, float) and value.is_integer():
        return (
            "store it as text or as a whole number, with pandas: `.astype(int)`, or `.astype('Int64')` if a value is "
            "missing"
        )
    if isinstance(value, bytes):
        return "store it as text, with pandas: `.str.decode('utf-8')`"
    if isinstance(value, list | tuple | Mapping):
        return "store it as text, with `json.dumps`"
    return "store it as text, with pandas: `.astype(str)`"


def _field(value: Any, column: str, source: RowOrigin) -> Json:
    try:
        found: Json = _as_json(value, column)
    except _NotJsonError as error:
        raise DataError(
            f"{source.place}: `{error.path}` is {_kind(error.value)}, but fields for the reward must be JSON",
            hint=f"remove `{column}` from `{source.key}.fields`, or store it as text",
        ) from error
    return found


class _NotJsonError(Exception):
    def __init__(self, path: str, value: Any) -> None:
        super().__init__(path)
        self.path, self.value = path, value


class _HalfCharacterError(Exception):
    def __init__(self, what: str, text: str) -> None:
        super().__init__(what)
        self.what, self.text = what, text


def _as_json(value: Any, path: str, left_out: dict[str, str] | None = None) -> Any:
    """Return a value as JSON. Dates and times become text in ISO 8601; decimal numbers and UUIDs become text.

    Values of mappings that have no such form are left out, and `left_out` gets their paths and types. Without
    `left_out`, or outside of mappings, they raise _NotJsonError. A text or key with a lone surrogate raises
    _HalfCharacterError: readers of the field could not write it.
    """
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        pass
    else:
        return value
    if isinstance(value, str):
        raise _HalfCharacterError(f"`{path}`", value)
    if isinstance(value, list | tuple):
        return [_as_json(inner, path, left_out) for inner in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if not isinstance(value, Mapping):
        raise _NotJsonError(path, value)
    found = dict[str, Any]()
    for key, inner in value.items():
        if any("\ud800" <= character <= "\udfff" for character in str(key)):
            raise _HalfCharacterError(f"a key of `{path}`" if path else "the name of a column", key)
        try:
            found[key] = _as_json(inner, f"{path}.{key}" if path else str(key), left_out)
        except _NotJsonError as error:
            if left_out is None:
                raise
            left_out[error.path] = f", because it is not JSON ({_type_name(error.value)})"
    return found


def _type_name(value: Any) -> str:
    is_undefined = isinstance(value, float) and not math.isfinite(value)
    return f"the number {value}" if is_undefined else type(value).__name__


def _kind(value: Any) -> str:
    return "null" if value is None else f"`{str(value)[:40]}` (a {type(value).__name__})"
