"""A tokenizer that a model folder brings as code is not run, also where somebody at a terminal says yes."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppoctl.data.template import load_tokenizer
from ppoctl.engines.vllm.tokens import Detokenizer


@pytest.mark.parametrize("load", [load_tokenizer, lambda path: Detokenizer(path, [2]).tokenizer])
def test_code_of_a_tokenizer_is_not_run(
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
