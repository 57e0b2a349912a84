"""A tokenizer small enough for hand-computed results: one token per word, and the special tokens of a chat
template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppoctl.data.row_tables import ColumnRows, Gsm8kRows

SPECIAL = ["<unk>", "<bos>", "<eos>"]
WORDS = [*SPECIAL, "<|system|>", "<|user|>", "<|assistant|>", "Be", "brief.", "one", "two", "three", "?"]
CHAT = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}{{- raise_exception('no tools here') -}}{%- endif -%}"
    "{{- '<|' + message['role'] + '|> ' + message['content'] + ' ' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

MakeTokenizer = Callable[..., Any]


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """Return a function that builds tokenizers: with or without a chat template, and with or without automatic begin
    and end tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(*, chat_template: str | None = CHAT, adds: str = "") -> Any:
        core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if adds:
            core.post_processor = processors.TemplateProcessing(
                single=adds, special_tokens=[("<bos>", WORDS.index("<bos>")), ("<eos>", WORDS.index("<eos>"))]
            )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., ColumnRows]:
    """Return a function that writes lines to a file, and returns the table that reads them, with columns `q` and
    `a`."""

    def write(*lines: str, name: str = "rows.jsonl", **keys: Any) -> ColumnRows:
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return ColumnRows(**{"format": "columns", "path": str(tmp_path / name), "prompt": "q", "answer": "a", **keys})

    return write


@pytest.fixture
def gsm8k(tmp_path: Path) -> Callable[..., Gsm8kRows]:
    """Return a function that writes lines to a file, and returns the GSM8K table that reads them."""

    def write(*lines: str, **keys: Any) -> Gsm8kRows:
        (tmp_path / "gsm8k.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return Gsm8kRows(**{"format": "gsm8k", "path": str(tmp_path / "gsm8k.jsonl"), **keys})

    return write


@pytest.fixture(scope="session")
def byte_level() -> Any:
    """Return a byte-level tokenizer like Qwen's, without merges and without a chat template: one token per byte."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=core)
