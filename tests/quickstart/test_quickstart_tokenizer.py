"""The committed tokenizer: small, lossless on any text, and with a chat template that ends a turn."""

import json
import re
import unicodedata
from pathlib import Path

import problems
import pytest
import tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

FAST = AutoTokenizer.from_pretrained(problems.HERE / "model")
GSM8K = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May? $1,234.50\n#### 72"
)


@given(st.text().map(lambda text: unicodedata.normalize("NFC", text)))
@example(GSM8K)
@example("  two  blanks\r\n\ttab <|eos|> don't , .")
def test_any_text_round_trips(text: str) -> None:
    """Qwen2's tokenizer class composes accents (NFC) before anything else; beyond that nothing is lost."""
    assert FAST.decode(FAST(text)["input_ids"]) == text


def test_every_word_of_questions_is_one_token() -> None:
    content = [json.loads(line) for line in (problems.HERE / "train.jsonl").read_text().splitlines()]
    for row in content[:1000]:
        tokens = FAST(row["question"])["input_ids"]
        assert len(tokens) == len(re.findall(r" ?[A-Za-z]+|\d| (?=\d)|[.,?]", row["question"])), row["question"]


def test_auto_tokenizer_and_plain_tokenizer_agree() -> None:
    """transformers picks the class by the model's type; the file alone must give the same ids."""
    plain = PreTrainedTokenizerFast.from_pretrained(problems.HERE / "model")
    assert plain(GSM8K)["input_ids"] == FAST(GSM8K)["input_ids"]
    assert len(plain) == len(FAST)


def test_vocabulary_is_small_and_end_and_pad_tokens_differ() -> None:
    assert len(FAST) == tokenizer.VOCAB_SIZE <= 1024
    assert FAST.eos_token_id != FAST.pad_token_id
    assert FAST.convert_ids_to_tokens(FAST("19")["input_ids"]) == ["1", "9"]


def test_prompts_and_answers_are_short() -> None:
    content = [json.loads(line) for line in (problems.HERE / "test.jsonl").read_text().splitlines()]
    assert max(len(FAST(row["question"])["input_ids"]) for row in content) <= 30
    assert max(len(FAST(row["answer"])["input_ids"]) for row in content) <= 30


def test_chat_template_renders_every_role() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    text = FAST.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|user|>1+1?<|assistant|>2<|eos|><|user|>2+2?<|assistant|>"
    ids = FAST.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == FAST(text)["input_ids"]
    assert ids.count(FAST.eos_token_id) == 1


def test_chat_template_rejects_unknown_role() -> None:
    with pytest.raises(Exception, match="unknown role: tool"):
        FAST.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_committed_tokenizer_equals_script_output(tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (problems.HERE / "model" / name).read_text()
