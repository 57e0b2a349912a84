"""Chat messages of rows. A message keeps all keys that a chat template could read, or its row is an error."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ppoctl.core.batch.prompts import Json, Message
from ppoctl.core.errors import DataError
from ppoctl.data.row_blocks import Place

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of chat messages."""
_EXAMPLE = 'chat messages look like {"role": "user", "content": "..."}'


def message_of(item: Any, where: Place, *, null_is_absent: bool, may_be_empty: bool = False) -> Message:
    """Return a message. `where` names it, for errors.

    A further key with null is left out. `null_is_absent`: this also holds inside the values of further keys, because
    Arrow gives each message the keys of all messages. `may_be_empty`: whether the content may be an empty text.

    Raises DataError if the role is unknown, the content is not text, or a further key is not JSON.
    """
    role = item.get("role") if isinstance(item, Mapping) else None
    if not isinstance(role, str):
        raise DataError(f"{where} must have a `role` and a `content`, both text", hint=_EXAMPLE)
    if role not in ROLES:
        raise DataError(f"{where} has the role `{role}`", hint=f"roles are {', '.join(ROLES)}")
    further = {
        str(key): _further(value, f"{where}: `{key}`", null_is_absent=null_is_absent)
        for key, value in item.items()
        if key not in ("role", "content") and value is not None
    }
    content = item.get("content")
    if isinstance(content, list | tuple):
        content = _text_of_parts(content, where)
    can_be_without = role == "assistant" and bool(further)
    if content is None and can_be_without:
        return Message(role, None, further if "content" not in item else {"content": None, **further})
    if not isinstance(content, str):
        raise DataError(f"{where} must have a `role` and a `content`, both text", hint=_EXAMPLE)
    is_result = role == "tool"
    if not content and (can_be_without or is_result or may_be_empty):
        return Message(role, content, further)
    return Message(role, text_of(content, where), further)


def text_of(value: str, where: Place) -> str:
    """Return a text. Raises DataError if it is blank, or has no UTF-8 form. `where` names it, for errors."""
    if not value.strip():
        raise DataError(f"{where} is empty", hint="remove the row")
    require_characters(value, where)
    return value


def require_characters(value: str, where: Place) -> None:
    """Raise DataError if a text has no UTF-8 form. `where` names it, for errors."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} contains half a character at {error.start} (a lone surrogate)", hint="fix the row"
        ) from error


def _text_of_parts(parts: Sequence[Any], where: Place) -> str:
    """Return the text of a content that is a list of parts: one part, which is text. Templates join several parts in
    different ways, with and without a line break."""
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if other := [kind for kind in kinds if kind != "text"]:
        shown = f"a part of the type `{other[0]}`" if isinstance(other[0], str) else "a part without a `type`"
        raise DataError(f"{where} has {shown}; only text can be read", hint="remove the row, or store its text")
    if len(parts) != 1:
        raise DataError(
            f"{where} has a `content` of {len(parts)} parts, and chat templates join parts in different ways",
            hint="join the parts of each message to one text",
        )
    if more := [key for key, value in parts[0].items() if key not in ("type", "text") and value is not None]:
        raise DataError(
            f"{where} has a text part with the key `{more[0]}`, which would be lost; only its text can be read",
            hint=f"remove `{more[0]}` from the part, or remove the row",
        )
    text = parts[0].get("text")
    if not isinstance(text, str):
        raise DataError(f"{where} has a text part without `text`", hint=_EXAMPLE)
    return text


def _further(value: Any, where: Place, *, null_is_absent: bool) -> Json:
    found: Json = _without_nulls(value) if null_is_absent else value
    try:
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:  # a lone surrogate is a ValueError
        raise DataError(f"{where} is not JSON: {error}", hint="store it as text, or remove it") from error
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value
