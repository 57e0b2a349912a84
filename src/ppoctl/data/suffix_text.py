"""Text that a chat template writes around the messages of an observation.

A small dialogue is rendered, in which each content is a probe whose place can be found in the text:

    render([user, assistant MARK, tool PROBE, tool PROBE])
        ... MARK | <|im_end|> ... | PROBE | ... | PROBE | ... <|im_start|>assistant
                   statics[0]               [1]           statics[2]

The text after MARK is the same in every conversation, unless the template depends on the history; `validate` rejects
such a template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ppoctl.core.batch.episodes import RejectedMessagesError
from ppoctl.core.batch.prompts import Message

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, object]], str]
"""Function that renders messages with the arguments of the template, up to the next generation prompt."""
Chat = Sequence[Mapping[str, Any]]

MARK = "MARK-OF-THE-TURN"
QUESTION: Chat = ({"role": "user", "content": "Question?"},)
"""The messages before the turn."""
TURN: Mapping[str, Any] = {"role": "assistant", "content": MARK}
_BLANKS = "\n \t\n \t \n"
_PLAIN, _DIFFICULT = "probe{}", f'{_BLANKS}"pr\n\\obe{{}} \u00e9"<&{_BLANKS}'
"""Forms of a probe. The second form shows how the template transforms a content."""
TRANSFORMS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "identity": str,
        "tojson": lambda content: json.dumps(content, ensure_ascii=False),
        "lstrip": str.lstrip,
        "rstrip": str.rstrip,
        "strip": str.strip,
    }
)
"""Known transforms of a content. A transform is found before a transform whose result is a part of its result."""


@dataclass(frozen=True)
class Frame:
    """Text of a template around contents, and the transform that the template applies to each content."""

    statics: tuple[str, ...]
    """Text before each content, and after the last one: one more than contents."""
    transforms: tuple[str, ...]

    def pieces(self, contents: Sequence[str]) -> list[str]:
        """Return static text and transformed contents in turn; the first and the last piece are static text."""
        shown = [TRANSFORMS[name](content) for name, content in zip(self.transforms, contents, strict=True)]
        return [piece for pair in zip(self.statics, shown, strict=False) for piece in pair] + [self.statics[-1]]


def filled(messages: Sequence[Message]) -> list[str]:
    """Return the contents that a frame of these messages receives. A template may omit an empty message, so an empty
    content is a part of the static text."""
    return [message.content for message in messages if message.content]


def suffix_frame(
    render: Render, messages: Sequence[Message], arguments: Mapping[str, object], history: Chat = (*QUESTION, TURN)
) -> Frame:
    """Return the frame of the text between a turn and the next turn. The frame depends on the roles of the messages,
    and on which of them are empty. `history` ends with the turn, which contains MARK.

    Raises RejectedMessagesError if the template rejects the messages, omits one, or transforms a content in an
    unknown way.
    """

    def after_mark(chat: Chat) -> str:
        parts = render((*history, *chat), arguments).split(MARK)
        if len(parts) != 2:
            raise ValueError(f"it writes an answer of the assistant {len(parts) - 1} times")
        return parts[1]

    return _frame(after_mark, messages)


def prompt_frame(
    render: Render, chat: Sequence[Message], first: Sequence[Message], arguments: Mapping[str, object]
) -> Frame:
    """Return the frame of the messages `first` after a chat. The first static text contains the chat.

    Raises RejectedMessagesError like `suffix_frame`.
    """
    before = [message.as_json() for message in chat]
    return _frame(lambda probes: render((*before, *probes), arguments), first)


def _frame(render: Callable[[Chat], str], messages: Sequence[Message]) -> Frame:
    roles = [message.role for message in messages]

    def rendered(form: str) -> tuple[str, list[str]]:
        probes = [form.format(number) if message.content else "" for number, message in enumerate(messages)]
        chat = [{"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)]
        try:
            return render(chat), list(filter(None, probes))
        except Exception as error:  # a chat template is code: it can fail in any way
            raise _rejected(roles, str(error)) from error

    text, probes = rendered(_DIFFICULT)
    transforms = [_transform_of(probe, text) for probe in probes]
    frame, other = (_located(*found, transforms) for found in ((text, probes), rendered(_PLAIN)))
    if frame is None or frame != other:
        raise _rejected(roles, "it omits a content, or changes it in a way that ppoctl does not know")
    return frame


def _transform_of(probe: str, text: str) -> str:
    return next((name for name, transform in TRANSFORMS.items() if transform(probe) in text), "identity")


def _located(text: str, probes: Sequence[str], transforms: Sequence[str]) -> Frame | None:
    """Return the frame of a text; None: the text does not contain each transformed probe once, in order."""
    statics = list[str]()
    for probe, transform in zip(probes, transforms, strict=True):
        before, found, text = text.partition(TRANSFORMS[transform](probe))
        if not found:
            return None
        statics.append(before)
    return Frame((*statics, text), tuple(transforms))


def _rejected(roles: Sequence[str], why: str) -> RejectedMessagesError:
    listed = ", ".join(f"`{role}`" for role in roles)
    return RejectedMessagesError(f"the chat template cannot write {listed} messages: {why}")
