"""A smallest complete recipe in an empty folder, which is the working directory, so that messages contain short
names."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hints import faults, settings_of
from ppoctl.core.errors import RecipeError
from ppoctl.recipe.loading.load import examine, load

SMALLEST = """\
name = "small"
steps = 10
[model]
path = "base"
[data.train]
format = "gsm8k"
path = "train.jsonl"
[rollout]
prompts_per_step = 4
max_prompt_tokens = 20
max_new_tokens = 13
[reward]
kind = "gsm8k"
[ppo]
minibatch_seqs = 2
[actor.optimizer]
lr = 1e-6
[critic.optimizer]
lr = 1e-5
"""

Write = Callable[..., Path]


def refusal(files: Sequence[Path], sets: Sequence[str] = (), *environ: Any) -> RecipeError:
    """Return the error of `load` with these arguments. Its hint can be typed, and the first problem is then gone."""
    with pytest.raises(RecipeError) as caught:
        load(files, sets, *environ)
    hint = caught.value.hint or ""
    assert faults(hint) == []
    # FILE, COLUMN and HOST are for the reader to choose.
    if (cure := settings_of(hint)) and not re.search(r"\b(FILE|COLUMN|HOST)\b", hint):
        first = re.sub(r": `[^`]*` = .*", "", caught.value.message.splitlines()[0])
        # A hint may be the correct form of a word that was typed as a file, or of a setting without a value.
        typed = [file for file in files if file.exists()], [text for text in sets if text not in first]
        _, after = examine(typed[0], [*typed[1], *cure], *environ)
        assert [str(finding) for finding in after if finding.is_error and first in str(finding)] == [], hint
    return caught.value


def model_as_read(folder: Path, **fields: object) -> str:
    """Write as much of a model as `load` reads, and return the setting that names it."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return f"model.path={folder}"


@pytest.fixture(params=["qwen2_moe", "qwen3_moe", "deepseek_v3"])
def experts(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A model with 6 experts of 32 columns, as far as `load` reads it; families use different fields for the number
    of experts."""
    count, heads = ("n_routed_experts", 4) if request.param == "deepseek_v3" else ("num_experts", 2)
    sizes = {"num_key_value_heads": heads, count: 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes |= {"n_group": 2} if request.param == "deepseek_v3" else {}
    return model_as_read(tmp_path, model_type=request.param, **sizes)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return `write(text, "a.toml")`, which writes a file into the working directory and returns its relative
    path."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "r.toml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    return write_file


@pytest.fixture
def smallest(write: Write) -> Path:
    return write(SMALLEST)
