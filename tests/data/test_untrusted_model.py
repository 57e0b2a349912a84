"""No code of a model folder runs: neither a tokenizer defined by code, even if a user at a terminal agrees, nor a
chat template."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.errors import DataError
from ppoctl.data.response_text import ResponseText
from ppoctl.data.row_tables import ColumnRows
from ppoctl.data.rows import DatasetRow
from ppoctl.data.template import PromptTemplate
from ppoctl.data.tokenizer import load_tokenizer


@pytest.mark.parametrize("load", [load_tokenizer, lambda path: ResponseText(path, [2]).tokenizer])
def test_tokenizer_code_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]
) -> None:
    (tmp_path / "crafted.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Odd: pass\nclass Config: pass\n"
    )
    named = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["crafted.Odd", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    config = {"model_type": "odd", "auto_map": {"AutoConfig": "crafted.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    with pytest.raises(Exception, match="contains custom code"):
        load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_chat_template_is_rendered_in_a_sandbox(make_tokenizer: Callable[..., Any]) -> None:
    template = PromptTemplate(make_tokenizer(chat_template="{{ ().__class__.__base__.__subclasses__() }}"))
    rows = ColumnRows(format="columns", path="f.jsonl", prompt="q", answer="a")
    with pytest.raises(DataError, match="access to attribute '__class__' of 'tuple' object is unsafe"):
        template.render([DatasetRow("train/000000-0", "one two", "3", "`f` line 1")], rows, name="train")
