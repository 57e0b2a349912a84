"""Input of a reward model: a prompt and its response, as token ids of the reward model's tokenizer.

    own    the chat template of the reward model, applied to the messages and to the response as the assistant's turn,
           or to all turns and observations of a conversation. There is no generation prompt, and the tokenizer adds
           no token
    text   the prompt text of the actor, followed by the response. The tokenizer adds its special tokens. It adds the
           beginning-of-sequence token only if the text does not begin with this token

transformers reads the output of the head at the last token that is not padding, so padding at the end is removed.
"""

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ppoctl.core.batch.prompts import Message
from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import EnvironmentProblemError, quoted
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.tokenizer import load_tokenizer
from ppoctl.models.folder import read_config

Template = Literal["own", "text"]


class RewardText:
    """Converter of prompts and responses to the input of a reward model."""

    def __init__(
        self,
        folder: Path,
        template: Template,
        max_tokens: int,
        key: str = "reward",
        clock: datetime | None = None,
    ) -> None:
        """Load the tokenizer. `key` is the recipe key of the reward model's table, and `clock` the time that its
        chat template reads.

        Raises EnvironmentProblemError if there is no tokenizer, or if a required chat template is missing.
        """
        self._tokenizer = load_tokenizer(str(folder), f"{key}.path")
        self._chat = ChatTemplate.of_folder(folder, clock)
        self._template, self._max_tokens = template, max_tokens
        self._padding = read_config(folder).get("pad_token_id")
        if template == "own" and self._chat.text is None:
            raise EnvironmentProblemError(
                f"the reward model in `{folder}` has no chat template",
                hint=f"ls {quoted(folder)}  # without one: --set {key}.template=text",
            )

    def tokens(self, request: ScoreRequest) -> tuple[int, ...]:
        """Return the token ids of the input.

        Raises ValueError if the chat template rejects the chat, or if the text has no tokens or more than
        `max_tokens` tokens.
        """
        ids = self._by_template(request) if self._template == "own" else self._as_text(request)
        while ids and ids[-1] == self._padding:
            ids.pop()
        if not ids:
            raise ValueError("the text for the reward model has no tokens")
        if len(ids) > self._max_tokens:
            raise ValueError(f"the text for the reward model has {len(ids)} tokens, more than {self._max_tokens}")
        return tuple(ids)

    def _by_template(self, request: ScoreRequest) -> list[int]:
        answer = request.conversation or (Message("assistant", request.response),)
        chat = [message.as_json() for message in (*request.messages, *answer)]
        try:
            special = self._tokenizer.special_tokens_map
            text = self._chat.rendered(chat, special, opens_turn=False)
        except Exception as error:  # a template is code and may raise any error
            raise ValueError(f"the reward model's chat template rejects the chat: {error}") from error
        return self._ids(text, special=False)

    def _as_text(self, request: ScoreRequest) -> list[int]:
        ids = self._ids(request.prompt + request.response, special=True)
        beginning = self._tokenizer.bos_token_id
        return ids[1:] if beginning is not None and ids[:2] == [beginning, beginning] else ids

    def _ids(self, text: str, *, special: bool) -> list[int]:
        readable = text.encode(errors="replace").decode()  # the library `tokenizers` rejects lone surrogates
        encoded: Any = self._tokenizer(readable, add_special_tokens=special, verbose=False)
        return list(encoded["input_ids"])
