"""Which rows of a set are used, which are counted, and which a start checks."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from data.conftest import CHAT
from ppoctl.core.batch.prompts import Prompt
from ppoctl.core.errors import DataError
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.index import digest_of, read_set
from ppoctl.data.prompt_set import Counts, Mixed, PromptSet
from ppoctl.data.row_tables import ColumnRows
from ppoctl.data.template import PromptTemplate

MakeTable = Callable[..., Any]
LINES = (
    '{"q": "one", "a": "1"}',
    '{"q": "one two three", "a": "2"}',
    '{"q": "one", "a": "1"}',
    '{"q": "one", "a": "another"}',
    '{"q": "one two three", "a": "2"}',
)


def prompts(table: ColumnRows, tokenizer: Any, most: int = 4, template: ChatTemplate | None = None) -> PromptSet:
    return PromptSet(read_set(table, name="train"), table, PromptTemplate(tokenizer, template), most)


def ids_and_answers(prompt_set: PromptSet) -> list[tuple[str, str | None]]:
    return [(prompt.id[6:12], prompt.answer) for prompt in prompt_set]


def test_repeated_rows_are_kept_or_dropped_and_counted(jsonl: MakeTable, make_tokenizer: Callable[..., Any]) -> None:
    kept = prompts(jsonl(*LINES), make_tokenizer(), most=9)
    assert [answer for _, answer in ids_and_answers(kept)] == ["1", "2", "1", "another", "2"]
    assert kept.counts == Counts(read=5, repeated=2, too_long=0, dropped=0, cut=0)
    dropped = prompts(jsonl(*LINES, duplicates="drop"), make_tokenizer(), most=9)
    # A row keeps its id, even if rows before it are left out.
    assert ids_and_answers(dropped) == [("000000", "1"), ("000001", "2"), ("000003", "another")]
    assert dropped.counts == Counts(read=5, repeated=2, too_long=0, dropped=2, cut=0)
    assert kept.rows.digest == dropped.rows.digest


def test_too_long_prompt_error_suggests_one_setting(
    jsonl: MakeTable, make_tokenizer: Callable[..., Any], tmp_path: Any
) -> None:
    assert prompts(jsonl(*LINES), make_tokenizer(), most=5)
    with pytest.raises(DataError) as caught:
        prompts(jsonl(*LINES), make_tokenizer())
    place = f"`{tmp_path}/rows.jsonl` line 2"
    assert caught.value.message.startswith("row `train/000001-")
    assert caught.value.message.endswith(
        f"({place}) has 5 prompt tokens, but `rollout.max_prompt_tokens` is 4; 2 of 5 rows of `data.train` exceed it"
    )
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("--set rollout.max_prompt_tokens=5")


def test_hint_drops_a_single_huge_row_instead_of_raising_the_limit(
    jsonl: MakeTable, make_tokenizer: Callable[..., Any]
) -> None:
    huge = [json.dumps({"q": question, "a": "1"}) for question in ("q " * 300, *map(str, range(19)))]
    with pytest.raises(DataError) as caught:
        prompts(jsonl(*huge), make_tokenizer())
    longer = "--set rollout.max_prompt_tokens=302"
    assert caught.value.hint == f"--set data.train.long_prompts=drop  # cut keeps the end of each prompt; or {longer}"


def test_long_prompts_are_dropped_if_the_recipe_says_so(jsonl: MakeTable, make_tokenizer: Callable[..., Any]) -> None:
    kept = prompts(jsonl(*LINES, long_prompts="drop"), make_tokenizer())
    assert ids_and_answers(kept) == [("000000", "1"), ("000002", "1"), ("000003", "another")]
    assert kept.counts == Counts(read=5, repeated=2, too_long=2, dropped=2, cut=0)
    both = prompts(jsonl(*LINES, long_prompts="drop", duplicates="drop"), make_tokenizer())
    assert both.counts == Counts(read=5, repeated=2, too_long=1, dropped=3, cut=0)
    assert both.counts.remarks() == "2 of 5 rows repeat an earlier one; 1 are too long; 2 are used"
    with pytest.raises(DataError, match=r"every row of `data.train` has more than 1 prompt tokens") as caught:
        prompts(jsonl(*LINES, long_prompts="drop"), make_tokenizer(), most=1)
    # The window of the shortest row, with which only some rows are used.
    assert caught.value.hint == "--set rollout.max_prompt_tokens=3"


def test_too_long_error_names_the_longest_row(jsonl: MakeTable, make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"row `train/000001-.* has 5 prompt tokens.*; 5 of 5 rows"):
        prompts(jsonl(*LINES), make_tokenizer(), most=2)


def test_long_prompt_keeps_its_last_tokens_with_cut(jsonl: MakeTable, make_tokenizer: Callable[..., Any]) -> None:
    def words(tokenizer: Any, most: int) -> tuple[PromptSet, list[str]]:
        prompt_set = prompts(jsonl(*LINES, long_prompts="cut"), tokenizer, most)
        return prompt_set, tokenizer.convert_ids_to_tokens(list(prompt_set[1].token_ids))

    prompt_set, left = words(make_tokenizer(), 4)
    assert left == ["one", "two", "three", "<|assistant|>"]
    assert prompt_set.counts == Counts(read=5, repeated=2, too_long=2, dropped=0, cut=2)
    assert len(prompt_set[0].token_ids) == 3
    # The common beginning of all texts remains.
    assert words(make_tokenizer(chat_template=None, adds="<bos> $A"), 3)[1] == ["<bos>", "two", "three"]


class Watched:
    """A tokenizer that records its calls."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner, self.tokenized = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, texts: Any, **keys: Any) -> Any:
        self.tokenized += len(texts)
        return self.inner(texts, **keys)


class WatchedTemplate(ChatTemplate):
    """A chat template that counts its chats."""

    chats = 0

    def rendered(self, *arguments: Any, **keys: Any) -> str:
        self.chats += 1
        return super().rendered(*arguments, **keys)


def test_startup_renders_each_distinct_question_once(jsonl: MakeTable, make_tokenizer: Callable[..., Any]) -> None:
    watched, template = Watched(make_tokenizer()), WatchedTemplate(CHAT, {})
    prompt_set = prompts(jsonl(*LINES), watched, most=9, template=template)
    assert (template.chats, watched.tokenized) == (2, 2)
    first: Prompt = prompt_set[0]
    assert prompt_set[0] is first
    assert (template.chats, watched.tokenized) == (3, 3)


def test_short_text_is_not_tokenized_to_check_its_length(jsonl: MakeTable, byte_level: Any) -> None:
    watched = Watched(byte_level)
    long = "\u00e9" * 20
    table = jsonl('{"q": "0123456789", "a": "1"}', f'{{"q": "{long}", "a": "1"}}')
    prompt_set = prompts(table, watched, most=40)
    # Unicode's composed form can turn one byte into three, so 40 non-ASCII bytes may be 120 tokens.
    assert watched.tokenized == 1
    assert [len(prompt.token_ids) for prompt in prompt_set] == [10, 40]
    with pytest.raises(DataError, match=r"has 40 prompt tokens.*; 1 of 2 rows"):
        prompts(table, watched, most=39)
    # A text is tokenized if it has one byte more than the limit has tokens.
    with pytest.raises(DataError, match=r"has 10 prompt tokens.*; 1 of 1 rows"):
        prompts(jsonl('{"q": "0123456789", "a": "1"}'), byte_level, most=9)
    assert len(prompts(jsonl('{"q": "0123456789", "a": "1"}'), byte_level, most=10)[0].token_ids) == 10


def test_mix_has_the_prompts_of_its_sets_in_order() -> None:
    mixed = Mixed(cast(Any, [["a", "b"], ["c"], ["d", "e", "f"]]))
    assert [mixed[index] for index in range(-6, 6)] == [*"abcdef"] * 2
    assert (list(mixed), mixed[1:4], len(mixed)) == ([*"abcdef"], ("b", "c", "d"), 6)
    for index in (6, -7):
        with pytest.raises(IndexError):
            mixed[index]


def test_changed_files_are_read_again(jsonl: MakeTable, tmp_path: Path) -> None:
    table = jsonl(*LINES)
    first = read_set(table, name="train")
    assert read_set(table, name="train") is first
    assert read_set(table, name="eval.x") is not first
    assert read_set(jsonl(*LINES, duplicates="drop"), name="train").digest == first.digest
    other = read_set(jsonl(*LINES[:2], LINES[0].replace("one", "two"), *LINES[3:]), name="train")
    assert other.digest != first.digest


def test_cached_rows_belong_to_one_table_and_source(jsonl: MakeTable) -> None:
    table = jsonl(*LINES)
    answers = table.model_copy(update={"prompt": "a", "answer": "q"})
    assert read_set(table, name="train").row(0).question == "one"
    assert read_set(answers, name="train").row(0).question == "1"
    assert [read_set(table, name="train", source=name).row(0).fields for name in ("", "x", "y")] == [
        {},
        {"source": "x"},
        {"source": "y"},
    ]


def test_row_digests_never_change(jsonl: MakeTable) -> None:
    """A run in progress is resumed by these digests, so they must not change."""
    rows = read_set(jsonl(*LINES[:2], fields=("a",)), name="eval.x")
    ends = [hashlib.sha256(f'"{question}"'.encode()).hexdigest()[:8] for question in ("one", "one two three")]
    hashed = (
        f'["eval/x/000000-{ends[0]}", "one", "1", {{"a": "1"}}]'
        f'["eval/x/000001-{ends[1]}", "one two three", "2", {{"a": "2"}}]'
    )
    assert rows.digest == hashlib.sha256(hashed.encode()).hexdigest()
    mixed = json.dumps([["a", rows.digest], ["b", rows.digest]])
    assert digest_of({"a": rows, "b": rows}) == hashlib.sha256(mixed.encode()).hexdigest()
    assert digest_of({"": rows}) == rows.digest


def test_rows_are_read_again_if_only_their_prompt_file_changed(jsonl: MakeTable, tmp_path: Path) -> None:
    frame = tmp_path / "frame.txt"
    frame.write_text("Say {question}")
    table = jsonl(*LINES, prompt_file=str(frame))
    first = read_set(table, name="train")
    assert read_set(table, name="train") is first
    frame.write_text("Tell me {question}")
    assert read_set(table, name="train").digest != first.digest
