"""Checks without transformers get the same prompts as training."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppoctl.data.chat import ChatTemplate
from ppoctl.data.row_tables import ColumnRows
from ppoctl.data.rows import DatasetRow
from ppoctl.data.template import PromptTemplate
from ppoctl.data.tokenizer import light_tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
ROWS = [
    DatasetRow("train/000000-0", "one two", "3", "`f` line 1"),
    DatasetRow("train/000001-1", "three ?", "3", "`f` line 2"),
]
TABLE = ColumnRows(format="columns", path="f.jsonl", prompt="q", answer="a", system="Be brief.")


def light(folder: Path) -> PromptTemplate:
    tokenizer = light_tokenizer(folder)
    assert tokenizer is not None
    return PromptTemplate(tokenizer, ChatTemplate.of_folder(folder))


@pytest.mark.parametrize("keys", [{}, {"chat_template": None}, {"chat_template": None, "adds": "<bos> $A <eos>"}])
def test_light_tokenizer_renders_prompts_like_transformers(
    make_tokenizer: Callable[..., Any], tmp_path: Path, keys: dict[str, Any]
) -> None:
    make_tokenizer(**keys).save_pretrained(tmp_path)
    theirs = PromptTemplate(load_tokenizer(str(tmp_path)))
    assert light(tmp_path).render(ROWS, TABLE, name="train") == theirs.render(ROWS, TABLE, name="train")


def test_text_is_neither_truncated_nor_padded(make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    """A tokenizer.json may configure truncation and padding; a truncated prompt would train on another question."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.save_pretrained(tmp_path / "whole")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "whole" / name).rename(tmp_path / name)
    light_one = light_tokenizer(tmp_path)
    assert light_one is not None
    assert light_one(["one", "one two three"], add_special_tokens=False) == {"input_ids": [[8], [8, 9, 10]]}
    assert light_one("one two three", add_special_tokens=False) == {"input_ids": [8, 9, 10]}


def test_token_bounds_equal_transformers(byte_level: Any, tmp_path: Path) -> None:
    byte_level.save_pretrained(tmp_path)
    texts = ["plain", "caf\u00e9"]
    assert [light(tmp_path).most_tokens(text) for text in texts] == [5, 15]
    assert [PromptTemplate(byte_level).most_tokens(text) for text in texts] == [5, 15]


@pytest.mark.parametrize("adds", ["lowercase", "prefix"])
def test_tokenizer_that_may_add_tokens_has_no_bound(byte_level: Any, tmp_path: Path, adds: str) -> None:
    from tokenizers import normalizers, pre_tokenizers

    byte_level.save_pretrained(tmp_path)
    template = light(tmp_path)
    core = template._tokenizer.backend_tokenizer
    if adds == "lowercase":
        core.normalizer = normalizers.NFKC()
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert template.most_tokens("plain") is None


def test_folder_without_a_readable_tokenizer_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert light_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert light_tokenizer(tmp_path) is None


def test_preview_imports_no_transformers(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    words = ["preview", str(tmp_path / "recipes" / "quickstart.toml"), "--set", "data.train.max_rows=200"]
    code = (
        f"import sys; from ppoctl.cli.app import run; code = run({words!r}); "
        "print(code, {'torch', 'transformers', 'numpy', 'pyarrow'} & sys.modules.keys() or '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 "
