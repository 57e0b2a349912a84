"""Token ids of a conversation in the format of the model's chat template.

Tokens in, tokens out: the ids of the next request are the ids so far and a suffix, and no text is rendered again.

    <|im_start|>assistant\\n 6*7 is <|im_end|>  \\n<|im_start|>user\\n 42 <|im_end|>\\n<|im_start|>assistant\\n
    prompt                  turn, in the loss  suffix, not in the loss

Ends of a turn:

    the template's end token     is in the turn; the suffix starts with the text after it (the newline)
    another end token            is in the turn, in the place of the template's end token
    stop string, stop token id   is in the turn; the suffix starts with the template's end token
    budget                       the turn ends the episode, so it has no suffix

If the template writes no end token, its text follows the end token of the turn. Without a chat template, the messages
of an observation are between blank lines, after the end of the turn.
"""

import json
from collections.abc import Mapping, Sequence

from ppoctl.core.batch.episodes import NO_ARGUMENTS, RejectedMessagesError
from ppoctl.core.batch.prompts import Json, Message, Prompt
from ppoctl.data.control_text import ControlText
from ppoctl.data.suffix_text import Frame, filled, prompt_frame, suffix_frame
from ppoctl.data.template import BLANK_LINE, PromptTemplate


class TemplateDialogue:
    """The port `Dialogue` for one model.

    `end_token_ids` are the end tokens of the model, without the stop token ids of the recipe.
    """

    def __init__(self, template: PromptTemplate, end_token_ids: Sequence[int]) -> None:
        self._template, self._ends = template, frozenset(end_token_ids)
        self._control = ControlText(template.tokenizer, end_token_ids)
        self._anchor = next((id for id in end_token_ids if id in self._control.texts), None)
        self._frames: dict[object, Frame] = {}

    def prompt(self, prompt: Prompt, first: Sequence[Message]) -> tuple[int, ...]:
        if not first:
            return prompt.token_ids
        _require_text(first)
        if self._template.has_chat_template:
            frame = prompt_frame(self._template.rendered, prompt.messages, first, prompt.template_args)
            pieces = frame.pieces(filled(first))
        else:
            between = [piece for message in first for piece in (message.content or "", BLANK_LINE)]
            pieces = [prompt.text + BLANK_LINE, *between[:-1], ""]
        return (*self._template.opening, *self._control.encode(pieces))

    def suffix(
        self, turn: Sequence[int], messages: Sequence[Message], arguments: Mapping[str, Json] = NO_ARGUMENTS
    ) -> tuple[int, ...]:
        _require_text(messages)
        if self._template.has_chat_template:
            opening, *rest = self._frame(messages, arguments).pieces(filled(messages))
        else:
            opening = BLANK_LINE
            rest = [piece for message in messages for piece in (message.content or "", BLANK_LINE)]
        last = turn[-1]
        before = last if last in self._control.texts else self._anchor
        return self._control.encode([self._after_end(opening, last), *rest], before)

    def _after_end(self, opening: str, last: int) -> str:
        """Return the text after the end of a turn, without the template's end token if the turn contains it."""
        if (found := self._control.first(opening)) is None:
            return opening
        token, end = found
        return opening[end:] if token == last or {token, last} <= self._ends else opening

    def _frame(self, messages: Sequence[Message], arguments: Mapping[str, Json]) -> Frame:
        shape = tuple((message.role, bool(message.content)) for message in messages)
        key = (shape, json.dumps(dict(arguments), sort_keys=True) if arguments else "")
        if key not in self._frames:
            self._frames[key] = suffix_frame(self._template.rendered, messages, arguments)
        return self._frames[key]


def _require_text(messages: Sequence[Message]) -> None:
    """Raise RejectedMessagesError if a content has no UTF-8 form, such as a lone surrogate."""
    for message in messages:
        try:
            (message.content or "").encode()
        except UnicodeEncodeError as error:
            raise RejectedMessagesError(f"a message of the role {message.role} is not valid text: {error}") from error
