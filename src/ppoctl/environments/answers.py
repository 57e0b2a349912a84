"""Conversion of the values that environments return to observations. Processes of environments import this module, so
it imports only the standard library."""

import re
from collections.abc import Mapping
from numbers import Real
from typing import Any, NoReturn

from ppoctl.core.batch.episode_metrics import TAKEN_NAMES
from ppoctl.core.batch.episodes import Observation
from ppoctl.core.batch.prompts import Message
from ppoctl.rewards.function import is_trainable
from ppoctl.rewards.user_function import kind_of

ROLES = ("user", "tool", "system")
"""Roles of the messages of an observation."""
_KEYS = ("messages", "reward", "done", "metrics")
_NAME = re.compile("[A-Za-z0-9_]+")
_EXPECTED = "an Observation, a mapping with its keys, a text, or a list of messages"


class InvalidAnswerError(Exception):
    """An environment returned something that is not an observation."""


def first_of(answer: Any) -> Observation:
    """Return the first observation: what `open` returned. Raises InvalidAnswerError."""
    first = Observation() if answer is None else observation_of(answer, role="user", method="open")
    if first != Observation(first.messages):
        _refuse("open", "ended the episode or returned a reward or metrics: the first observation has messages only")
    return first


def observation_of(answer: Any, *, role: str, method: str = "step") -> Observation:
    """Return the observation that a method returned. `role` is the role of a plain text.

    Raises InvalidAnswerError, which names the value and the expected types.
    """
    if isinstance(answer, Observation):
        fields: Mapping[Any, Any] = vars(answer)
    elif isinstance(answer, Mapping):
        fields = answer
    elif isinstance(answer, str | list | tuple):
        fields = {"messages": answer}
    elif answer is None:
        _refuse(method, "returned None: does every path through it end with `return`?")
    else:
        _refuse(method, f"returned a {kind_of(answer)}, not {_EXPECTED}")
    for name in fields:
        if name not in _KEYS:
            _refuse(method, f"returned a mapping with `{name}`; the keys of an observation are {', '.join(_KEYS)}")
    done = _plain(fields.get("done", False))
    if not isinstance(done, bool):
        _refuse(method, f"returned a {kind_of(done)} as `done`, not True or False")
    messages = _messages(method, fields.get("messages", ()), role)
    if method == "step" and not messages and not done:
        _refuse(method, "returned neither messages nor `done = True`: the actor would have nothing to answer")
    reward = _number(method, fields.get("reward", 0.0), "as `reward`")
    return Observation(messages, reward, done, _metrics(method, fields.get("metrics", {})))


def _messages(method: str, value: Any, role: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        value = [Message(role, value)]
    if not isinstance(value, list | tuple):
        _refuse(method, f"returned a {kind_of(value)} as `messages`, not a text or a list of messages")
    return tuple(_message(method, one) for one in value)


def _message(method: str, value: Any) -> Message:
    fields = value.as_json() if isinstance(value, Message) else value
    if not isinstance(fields, Mapping) or set(fields) != {"role", "content"}:
        _refuse(method, f"returned a {kind_of(value)} as a message, not a mapping with `role` and `content`")
    role, content = fields["role"], fields["content"]
    if role not in ROLES:
        _refuse(method, f"returned a message with the role {kind_of(role)}, not one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        _refuse(method, f"returned a {kind_of(content)} as the content of a message, not a text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        _refuse(method, f"returned a text that is not valid Unicode: {content[error.start]!a} is half a character")
    return Message(role, str(content))


def _metrics(method: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        _refuse(method, f'returned a {kind_of(value)} as `metrics`, not a mapping such as `{{"guesses": 2}}`')
    for name in value:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            _refuse(method, f"returned a metric named {kind_of(name)}: letters, digits and underscores are allowed")
        if name in TAKEN_NAMES:
            _refuse(
                method, f"returned a metric named `{name}`; the names {', '.join(TAKEN_NAMES)} are those of ppoctl"
            )
    return {name: _number(method, number, f"as metric `{name}`") for name, number in value.items()}


def _number(method: str, value: Any, role: str) -> float:
    number = _plain(value)
    if not isinstance(number, Real):
        _refuse(method, f"returned a {kind_of(number)} {role}, not a number")
    if not is_trainable(float(number)):
        _refuse(method, f"returned `{float(number)}` {role}, not a finite number")
    return float(number)


def _plain(value: Any) -> Any:
    """Return the number in a scalar of numpy or torch; other values unchanged."""
    return value.item() if hasattr(value, "item") else value


def _refuse(method: str, problem: str) -> NoReturn:
    raise InvalidAnswerError(f"`{method}` {problem}")
