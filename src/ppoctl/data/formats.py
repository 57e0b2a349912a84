"""Parse raw rows of each format into question, ground truth and further fields.

The parsers never guess: a row that does not match its format raises an error that names the place of the row.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppoctl.batch.prompts import Json, Message
from ppoctl.data.row_blocks import Place, columns_of, lookup
from ppoctl.errors import DataError
from ppoctl.recipe.rows import ColumnRows, DialogueRows, Gsm8kRows, PythonRows, SingleTable, VerlRows

_GSM8K_MARK = "####"
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of chat messages."""
_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}

Question = str | tuple[Message, ...]
ParsedRow = tuple[Question, str | None, dict[str, Json]]
"""Question, ground truth and further fields of a row."""


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


def parse_row(raw: Mapping[str, Any], place: Place, table: SingleTable, key: str) -> ParsedRow:
    """Return question, ground truth and further fields of a raw row.

    Raises DataError if a column is missing, or if a value is not a question, an answer or JSON.
    """
    if isinstance(table, DialogueRows):
        chat, responses = _dialogue(raw, place, key)
        return chat, None, {**responses, **_fields(raw, place, table, key, ("chosen", "rejected"))}
    columns = _columns(table)
    question = _question(_value(raw, columns.prompt, place, key), columns.prompt, place)
    answer = _truth(raw, columns, place, key)
    if isinstance(table, Gsm8kRows) and _GSM8K_MARK not in (answer or ""):
        raise DataError(
            f"{place}: `answer` does not end in `{_GSM8K_MARK} N`",
            hint=f'to read answers that are only a number, set `format = "columns"` in [{key}]',
        )
    used = (columns.prompt, *([columns.answer] if columns.answer else []))
    return question, answer, _fields(raw, place, table, key, used)


def _columns(table: SingleTable) -> _Columns:
    if isinstance(table, Gsm8kRows):
        return _Columns("question", "answer")
    if isinstance(table, VerlRows):
        return _Columns("prompt", "reward_model.ground_truth", needs_answer=False)
    if isinstance(table, PythonRows):
        return _Columns("prompt", "answer", needs_answer=False)
    assert isinstance(table, ColumnRows)
    return _Columns(table.prompt, table.answer)


def _truth(raw: Mapping[str, Any], columns: _Columns, place: Place, key: str) -> str | None:
    if columns.answer is None:
        return None
    try:
        answer = lookup(raw, columns.answer)
    except KeyError:
        answer = None
        if columns.needs_answer:
            _value(raw, columns.answer, place, key)
    if answer is None and not columns.needs_answer:
        return None
    return _answer(answer, columns.answer, place)


def _fields(
    raw: Mapping[str, Any], place: Place, table: SingleTable, key: str, used: tuple[str, ...]
) -> dict[str, Json]:
    if table.fields is not None:
        return {column: _field(_value(raw, column, place, key), column, place) for column in table.fields}
    rest: Mapping[str, Any] = raw
    for column in used:
        rest = _without(rest, column)
    return {column: _field(value, column, place) for column, value in rest.items()}


def _without(raw: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return the row without this column, and without parents of the column that are empty without it."""
    head, _, rest = column.partition(".")
    name = column if column in raw else head
    kept = {other: value for other, value in raw.items() if other != name}
    if name != column and isinstance(raw.get(name), Mapping) and (inner := _without(raw[name], rest)):
        kept[name] = inner
    return kept


def _value(raw: Mapping[str, Any], column: str, place: Place, key: str) -> Any:
    try:
        return lookup(raw, column)
    except KeyError:
        available = ", ".join(f"`{name}`" for name in columns_of(raw)) or "none"
        raise DataError(
            f"{place} has no column `{column}`; its columns are {available}",
            hint=f'map them in [{key}]: `format = "columns"`, `prompt = "COLUMN"`, `answer = "COLUMN"`',
        ) from None


def _question(value: Any, column: str, place: Place) -> Question:
    if isinstance(value, str):
        return _text(value, column, place)
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f"{place}: `{column}` is {_kind(value)}, but a prompt must be text or a list of chat messages",
            hint="name the column with the question as `prompt`",
        )
    messages = tuple(_messages(value, column, place))
    if messages[-1].role == "assistant":
        raise DataError(
            f"{place}: the last message in `{column}` is from the assistant, so there is nothing to answer",
            hint="remove the assistant's message",
        )
    return messages


def _messages(value: list[Any] | tuple[Any, ...], column: str, place: Place) -> list[Message]:
    messages: list[Message] = []
    for item in value:
        role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{place}: message {len(messages) + 1} in `{column}` must have a `role` and a `content`, both text",
                hint='chat messages look like {"role": "user", "content": "..."}',
            )
        if role not in ROLES:
            raise DataError(
                f"{place}: message {len(messages) + 1} in `{column}` has the role `{role}`",
                hint=f"roles are {', '.join(ROLES)}",
            )
        messages.append(Message(role, _text(content, column, place)))
    return messages


def _dialogue(raw: Mapping[str, Any], place: Place, key: str) -> tuple[Question, dict[str, Json]]:
    """Return the common beginning of two dialogues, up to the last turn of the user, and the answer of each."""
    turns = {column: _turns(_value(raw, column, place, key), column, place) for column in ("chosen", "rejected")}
    common = 0
    for chosen, rejected in zip(turns["chosen"], turns["rejected"], strict=False):
        if chosen != rejected:
            break
        common += 1
    chat = turns["chosen"][:common]
    while chat and chat[-1][0] != "user":
        chat = chat[:-1]
    if not chat:
        raise DataError(
            f"{place}: `chosen` and `rejected` do not begin with the same user turn",
            hint="remove the row: the two dialogues must have the same beginning",
        )
    answers = {column: turn[len(chat)] if len(turn) > len(chat) else None for column, turn in turns.items()}
    for column, answer in answers.items():
        if answer is None or answer[0] != "assistant":
            raise DataError(
                f"{place}: `{column}` has no assistant turn after the common beginning", hint="remove the row"
            )
    responses = {column: answer[1] for column, answer in answers.items() if answer is not None}
    return tuple(Message(role, _text(content, "chosen", place)) for role, content in chat), {**responses}


def _turns(value: Any, column: str, place: Place) -> list[tuple[str, str]]:
    """Return role and content of each turn of a dialogue. An assistant turn may be empty, as in HH-RLHF."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        messages = [(item.get("role"), item.get("content")) for item in value]
        if all(role in ROLES and isinstance(content, str) for role, content in messages):
            return [(str(role), str(content)) for role, content in messages]
    elif isinstance(value, str):
        before, *parts = _TURN.split("\n\n" + value.lstrip("\n"))
        if not before.strip() and parts:
            speakers, texts = parts[::2], parts[1::2]
            return [(_SPEAKERS[speaker], text.strip()) for speaker, text in zip(speakers, texts, strict=True)]
    raise DataError(
        f"{place}: `{column}` is {_kind(value)}, but a dialogue must be text with `Human:` and `Assistant:`, or a "
        "list of chat messages",
        hint='for other rows, use `format = "columns"` or `format = "python"`',
    )


def _answer(value: Any, column: str, place: Place) -> str:
    # bool is a subclass of int, but not a plausible ground truth. A float is rejected, because its text is ambiguous.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{place}: `{column}` is {_kind(value)}, but an answer must be text or a whole number",
            hint="name the column with the ground truth as `answer`",
        )
    return _text(value, column, place)


def _field(value: Any, column: str, place: Place) -> Json:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place}: `{column}` is {_kind(value)}, but fields for the reward must be JSON: {error}",
            hint="remove it from `fields`, or store it as text",
        ) from error
    field: Json = value
    return field


def _text(value: str, column: str, place: Place) -> str:
    if not value.strip():
        raise DataError(f"{place}: `{column}` is empty", hint="remove the row, or name another column")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: `{column}` contains half a character at {error.start} (a lone surrogate)", hint="fix the row"
        ) from error
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"`{str(value)[:40]}` (a {type(value).__name__})"
