"""Tool calls in a turn, read by vLLM's tool parsers in the process of the engine.

vLLM's parsers log an exception and return no call if a call is malformed, so that a server returns the text as it is.
Here a text that starts a call and contains no complete one is malformed: the environment explains the error to the
actor.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ppoctl.core.batch.episodes import ToolCall
from ppoctl.core.errors import RecipeError

MOST_CALLS = 64
"""Maximum number of calls in a turn of a format with `_Format.marks`. The regular expression of such a parser takes
time that grows with the third power of the number of marks, and a policy that fails may repeat them."""
_MOST_LEVELS = 64
"""Maximum depth of the arguments. Every process that a call passes must be able to read them as JSON."""


class MalformedCallError(ValueError):
    """A text starts a tool call that cannot be read. The message is one sentence, which the actor reads."""


@dataclass(frozen=True)
class ParsedCalls:
    """Tool calls of a turn: fields of a `Sample`."""

    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


NO_CALLS = ParsedCalls()


class ToolCallParser(Protocol):
    """Parser of one format of tool calls. Texts contain special tokens."""

    def is_attempt(self, text: str) -> bool:
        """Whether the text starts a tool call."""
        ...

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """Return the calls of a text that starts one, in order. Raises MalformedCallError."""
        ...


def parsed_calls(parser: ToolCallParser, text: str) -> ParsedCalls:
    """Return the calls of a turn, or the reason why they cannot be read."""
    if not parser.is_attempt(text):
        return NO_CALLS
    try:
        return ParsedCalls(parser.calls(text))
    except MalformedCallError as error:
        return ParsedCalls(malformed=str(error))


@dataclass(frozen=True)
class _Format:
    """Facts about a format of tool calls."""

    start: str
    """Regular expression that matches where a call, or a list of calls, starts."""
    form: str
    """Form of a call, for the message to the actor."""
    marks: tuple[str, ...] = ()
    """Texts that each call contains once, if vLLM's parser skips calls that it cannot read."""


_FORMATS: Mapping[str, _Format] = {
    "hermes": _Format("<tool_call>", "a JSON object with `name` and `arguments`"),
    # A call has no start of its own, except for the token that Llama 3.1 writes before some calls.
    "llama3_json": _Format(
        r'<\|python_tag\|>|\A\s*\{|\{\s*"(name|parameters|arguments)"', "a JSON object with `name` and `parameters`"
    ),
    "mistral": _Format(r"\[TOOL_CALLS\]", "the form of the chat template, with arguments in JSON"),
    "deepseek_v3": _Format(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "the form of the chat template, with arguments in one line of JSON",
        marks=("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>"),
    ),
}


class VllmToolCalls:
    """A `ToolCallParser` on vLLM's parser of the format with this name."""

    def __init__(self, name: str, tokenizer: Any, model: str) -> None:
        """`model` is the folder of the tokenizer, for errors. Imports vLLM. Raises RecipeError if the tokenizer lacks
        a token of the format."""
        from vllm.tool_parsers import ToolParserManager

        for package in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(package).setLevel(logging.CRITICAL + 1)
        self._format = _FORMATS[name]
        self._start = re.compile(self._format.start)
        try:
            self._parser: Any = ToolParserManager.get_tool_parser(name)(tokenizer)
        except RuntimeError as error:
            raise RecipeError(
                f"tool calls in the format `{name}` need a token that the tokenizer of `{model}` lacks: {error}",
                hint='choose another format, for example: --set environment.call_format="hermes"',
            ) from error

    def is_attempt(self, text: str) -> bool:
        """See `ToolCallParser`."""
        return self._start.search(text) is not None

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """See `ToolCallParser`."""
        started = max((text.count(mark) for mark in self._format.marks), default=0)
        if started > MOST_CALLS:
            raise MalformedCallError(f"a turn can contain at most {MOST_CALLS} tool calls")
        try:
            found = self._parser.extract_tool_calls(text, request=None).tool_calls
        except Exception:  # noqa: BLE001 - the parsers do not say which errors they raise for malformed text
            found = []
        if not found:
            raise MalformedCallError(f"a tool call was started, but it does not have {self._format.form}")
        if len(found) < started:
            raise MalformedCallError(
                f"{len(found)} of {started} tool calls could be read; each must have {self._format.form}"
            )
        return tuple(_call(call.function.name, call.function.arguments) for call in found)


def _call(name: str, arguments: str) -> ToolCall:
    if not name or not name.isprintable():
        raise MalformedCallError("a tool call does not have a name that can be read")
    try:
        values = json.loads(arguments)
        # Later processes read the call as UTF-8 JSON, which has no lone surrogates and no infinite numbers.
        json.dumps([name, values], ensure_ascii=False, allow_nan=False).encode()
        is_too_deep = _levels(values) > _MOST_LEVELS
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"the arguments of `{name:.80}` are not valid JSON") from error
    if is_too_deep:
        raise MalformedCallError(f"the arguments of `{name:.80}` have more than {_MOST_LEVELS} levels")
    if not isinstance(values, dict):
        raise MalformedCallError(f"the arguments of `{name:.80}` are not a JSON object")
    return ToolCall(name, values)


def _levels(value: Any) -> int:
    """Return the depth of a JSON value; 1 for a value that contains no other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_levels, inner), default=0)
