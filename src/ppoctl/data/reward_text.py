"""The text that a reward model reads of a prompt with its response, as ids of its own tokenizer.

    own    the model's own chat template over the messages and the response as the assistant's turn, without what
           opens another turn; no token is added
    text   the prompt as the actor was given it, and the response behind it; the tokenizer adds its special tokens,
           that of the beginning only where the text does not begin with it

transformers reads a head's output at the last token that is no padding, so padding at the end of a text is cut off.
"""

from pathlib import Path
from typing import Any, Literal

from ppoctl.batch.scores import ScoreRequest
from ppoctl.data.template import load_tokenizer
from ppoctl.errors import EnvironmentProblemError, quoted
from ppoctl.model.folder import read_config

Template = Literal["own", "text"]


class RewardText:
    """How a reward model is shown a response."""

    def __init__(self, folder: Path, template: Template, max_tokens: int, key: str = "reward") -> None:
        """Load the tokenizer. Raises EnvironmentProblemError where there is none, or no chat template in it. `key`
        is that of the model's table."""
        self._tokenizer = load_tokenizer(str(folder), f"{key}.path")
        self._template, self._max_tokens = template, max_tokens
        self._padding = read_config(folder).get("pad_token_id")
        if template == "own" and getattr(self._tokenizer, "chat_template", None) is None:
            raise EnvironmentProblemError(
                f"the reward model in `{folder}` has no chat template",
                hint=f"ls {quoted(folder)}  # without one: --set {key}.template=text",
            )

    def tokens(self, request: ScoreRequest) -> tuple[int, ...]:
        """Ids of the text. Raises ValueError where the template refuses the chat, and where the text has no token or
        too many."""
        ids = self._by_template(request) if self._template == "own" else self._as_text(request)
        while ids and ids[-1] == self._padding:
            ids.pop()
        if not ids:
            raise ValueError("the text for the reward model has no token")
        if len(ids) > self._max_tokens:
            raise ValueError(f"the text for the reward model has {len(ids)} tokens, more than {self._max_tokens}")
        return tuple(ids)

    def _by_template(self, request: ScoreRequest) -> list[int]:
        chat = [{"role": message.role, "content": message.content} for message in request.messages]
        chat.append({"role": "assistant", "content": request.response})
        try:
            text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
        except Exception as error:  # a template is code: it can fail in any way
            raise ValueError(f"the reward model's chat template refuses the chat: {error}") from error
        return self._ids(str(text), special=False)

    def _as_text(self, request: ScoreRequest) -> list[int]:
        ids = self._ids(request.prompt + request.response, special=True)
        beginning = self._tokenizer.bos_token_id
        return ids[1:] if beginning is not None and ids[:2] == [beginning, beginning] else ids

    def _ids(self, text: str, *, special: bool) -> list[int]:
        readable = text.encode(errors="replace").decode()  # tokenizers takes no lone surrogates
        encoded: Any = self._tokenizer(readable, add_special_tokens=special, verbose=False)
        return list(encoded["input_ids"])
