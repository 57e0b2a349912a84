"""Chat messages of rows: what the chat template reads is what the row has, or the row is an error."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.batch.episodes import EnvironmentRow, as_plain, messages_from
from ppoctl.core.batch.prompts import Message, Prompt, Prompts
from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import DataError
from ppoctl.data.index import read_set
from ppoctl.data.row_tables import ColumnRows
from ppoctl.data.rows import Content, read_rows
from ppoctl.data.template import PromptTemplate

Chat = list[dict[str, Any]]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "find", "arguments": {"word": "x"}}}
AS_TEXT = {"id": "c3", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USER: dict[str, Any] = {"role": "user", "content": "one"}
CHATS: dict[str, Chat] = {
    "plain": [USER],
    "a name": [{**USER, "name": "Ann"}],
    "a call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}],
    "a call without content": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]},
        {"role": "tool", "content": "", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": "none", "tool_call_id": "c2", "name": "find"},
    ],
    "arguments as text": [USER, {"role": "assistant", "content": None, "tool_calls": [AS_TEXT]}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "two", "reasoning_content": "one + one"}, USER],
}
TEMPLATE = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ ' ' ~ m.name if m.name is defined }}"
    "{{ ' thought ' ~ m.reasoning_content if m.reasoning_content }}"
    "{{ ' null' if m.content is none }}{{ ' ' ~ m.content if m.content }}"
    "{%- for c in m.tool_calls or [] %} {{ c.id }} {{ c | tojson }}{% endfor %}"
    "{{ ' of ' ~ m.tool_call_id if m.tool_call_id is defined }} {% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)


def as_jsonl(folder: Path, *chats: Chat, **keys: Any) -> ColumnRows:
    (folder / "x.jsonl").write_text("".join(json.dumps({"q": chat, "a": "1"}) + "\n" for chat in chats))
    return ColumnRows(format="columns", path=str(folder / "x.jsonl"), prompt="q", answer="a", **keys)


def as_parquet(folder: Path, *chats: Chat) -> ColumnRows:
    """The arguments of each call get the keys of all calls, with null."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"q": chat, "a": "1"} for chat in chats]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "x.parquet")
    return ColumnRows(format="columns", path=str(folder / "x.parquet"), prompt="q", answer="a")


@pytest.mark.parametrize("write", [as_jsonl, as_parquet])
def test_template_reads_messages_as_transformers_gives_them(
    make_tokenizer: Callable[..., Any], tmp_path: Path, write: Callable[..., ColumnRows]
) -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATE)
    chats = [chat for name, chat in CHATS.items() if write is as_jsonl or name != "arguments as text"]
    rendered = PromptTemplate(tokenizer).render(
        read_rows(table := write(tmp_path, *chats), name="train"), table, name="train"
    )
    expected = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    assert [text.text for text in rendered] == expected


def test_null_is_passed_on_where_the_file_can_lack_a_key(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"a": None}}}
    chat = [USER, {"role": "assistant", "tool_calls": [call], "name": None}, {"role": "tool", "content": "3"}]
    (row,) = read_rows(as_jsonl(tmp_path, chat), name="train")
    assert isinstance(row.question, tuple)
    assert row.question[1].as_json() == {"role": "assistant", "tool_calls": [call]}


def test_further_keys_are_counted_by_every_digest(tmp_path: Path) -> None:
    chats = [CHATS["a call"], [USER, {**CHATS["a call"][1], "tool_calls": [OTHER]}, CHATS["a call"][2]]]
    rows = read_set(as_jsonl(tmp_path, *chats, CHATS["a call"], duplicates="drop"), name="train")
    assert list(rows.repeats) == [0, 0, 1]
    first, second = (rows.row(number) for number in (0, 1))
    assert first.id[-8:] != second.id[-8:]
    prompts = [Prompts(1, (Prompt("1", (1,), "x", None, row.question),)) for row in (first, second)]  # type: ignore[arg-type]
    assert prompts[0].identity != prompts[1].identity


def test_message_without_further_keys_has_its_old_digest_and_bytes() -> None:
    message = Message("user", "one")
    assert message.as_json() == {"role": "user", "content": "one"} == {**Message.from_json(USER).as_json()}
    content = Content((message,), "1", {}, "place")
    assert content.digest == hashlib.sha256(b'[["user", "one"]]').digest()
    written = [["1", [1], "x", None, [["user", "one"]], {}]]
    prompt = Prompt("1", (1,), "x", None, (message,))
    assert Prompts(1, (prompt,)).identity == hashlib.sha256(json.dumps(written[0]).encode() + b"\n").hexdigest()


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_message_survives_json(chat: Chat) -> None:
    messages = [Message.from_json(message) for message in chat]
    assert [message.as_json() for message in messages] == chat
    assert [Message.from_json(json.loads(json.dumps(message.as_json()))) for message in messages] == messages


def test_rewards_and_environments_get_the_further_keys() -> None:
    messages = tuple(map(Message.from_json, CHATS["a call without content"]))
    prompt = Prompt("1", (1,), "x", None, messages)
    sent = json.loads(json.dumps(ScoreRequest.about(prompt, "y", "terminated").as_json()))
    assert sent["messages"] == CHATS["a call without content"]
    assert ScoreRequest.from_json(sent).messages == messages
    row = json.loads(json.dumps(as_plain(EnvironmentRow.of(prompt))))
    assert messages_from(row["messages"]) == messages


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
        "message 1 in `q` has a part of the type `image_url`; only text can be read",
    ),
    "two texts": (
        {"role": "user", "content": [{"type": "text", "text": "x"}] * 2},
        "message 1 in `q` has a `content` of 2 parts, and chat templates join parts in different ways",
    ),
    "an image next to the text": (
        {"role": "user", "content": [{"type": "text", "text": "How?", "none": None, "image": "f0.png"}]},
        "message 1 in `q` has a text part with the key `image`, which would be lost",
    ),
    "no content": ({"role": "user", "content": None, "name": "x"}, "message 1 in `q` must have a `role` and a"),
    "not JSON": ({**USER, "score": float("nan")}, "message 1 in `q`: `score` is not JSON: Out of range"),
    "half a character": ({**USER, "name": "\ud800"}, "message 1 in `q`: `name` is not JSON: 'utf-8' codec"),
}


@pytest.mark.parametrize("case", PARTS)
def test_message_that_cannot_be_passed_on_is_an_error_that_names_its_key(tmp_path: Path, case: str) -> None:
    message, says = PARTS[case]
    with pytest.raises(DataError) as caught:
        read_rows(as_jsonl(tmp_path, [message]), name="train")
    assert f"line 1: {says}" in caught.value.message


def test_content_of_one_text_part_is_its_text(tmp_path: Path) -> None:
    (row,) = read_rows(as_jsonl(tmp_path, [{"role": "user", "content": [{"type": "text", "text": "x"}]}]), name="t")
    assert row.question == (Message("user", "x"),)


def test_model_without_template_refuses_further_keys(make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    table = as_jsonl(tmp_path, CHATS["a name"])
    with pytest.raises(DataError, match="has a message with `name`, but the model has no chat template"):
        PromptTemplate(make_tokenizer(chat_template=None)).render(read_rows(table, name="train"), table, name="train")
