"""The text that a reward model reads: its own template over the chat, or the unchanged prompt and response."""

import json
from pathlib import Path

import pytest

from data.conftest import WORDS, MakeTokenizer
from ppoctl.core.batch.prompts import Message
from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.data.reward_text import RewardText, Template


def request(response: str, prompt: str = "one two", role: str = "user") -> ScoreRequest:
    chat = (Message("system", "Be brief."), Message(role, "one two"))
    return ScoreRequest("p", prompt, chat, response, None, {}, "terminated")


def opened(folder: Path, tokenizer: object, template: Template, *, padding: str | None = None) -> RewardText:
    tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    config = {} if padding is None else {"pad_token_id": WORDS.index(padding)}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return RewardText(folder, template, max_tokens=9)


def words(ids: tuple[int, ...]) -> str:
    return " ".join(WORDS[id] for id in ids)


def test_own_template_renders_the_response_as_assistant_turn(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    text = opened(tmp_path, make_tokenizer(adds="<bos> $A"), "own")
    shown = "<|system|> Be brief. <|user|> one two <|assistant|> three ?"
    assert words(text.tokens(request("three ?"))) == shown


def test_text_template_appends_the_response_to_the_prompt(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    text = opened(tmp_path, make_tokenizer(adds="<bos> $A"), "text")
    assert words(text.tokens(request(" three"))) == "<bos> one two three"
    assert words(text.tokens(request(" three", prompt="<bos> one"))) == "<bos> one three"


def test_trailing_padding_is_removed(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    text = opened(tmp_path, make_tokenizer(adds="$A <eos>"), "text", padding="<eos>")
    assert words(text.tokens(request(" three"))) == "one two three"


def test_unreadable_inputs_raise_value_errors(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    text = opened(tmp_path, make_tokenizer(), "own")
    with pytest.raises(ValueError, match="has 10 tokens, more than 9"):
        text.tokens(request("three three three"))
    with pytest.raises(ValueError, match="rejects the chat: no tools here"):
        text.tokens(request("three", role="tool"))
    with pytest.raises(ValueError, match="has no token"):
        opened(tmp_path, make_tokenizer(), "text").tokens(request("", prompt=""))


def test_model_without_a_chat_template_is_refused(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblemError, match="has no chat template") as caught:
        opened(tmp_path, make_tokenizer(chat_template=None), "own")
    assert "--set reward.template=text" in str(caught.value.hint)
