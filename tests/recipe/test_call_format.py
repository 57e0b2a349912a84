"""Format of tool calls: that of the model's family, unless the recipe sets another."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from ppoctl.core.errors import RecipeError
from ppoctl.environments.environment_table import CallFormat
from ppoctl.models.families import FAMILIES
from ppoctl.recipe.call_format import CALL_TOKENS, call_format_of
from ppoctl.recipe.loading.load import load

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"
LIMITS = "turns=3, tokens=200"
TOOLS = f"environment={{kind='tools', tools=['calculator'], {LIMITS}}}"
PYTHON = f"environment={{kind='python', path='package.module:Name', {LIMITS}}}"


def model(folder: Path, family: str, *, tokens: Sequence[str] = (), is_ascii: bool = False) -> Path:
    """Write as much of a model as the format depends on."""
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    # The chat template names the token too, which does not make it one.
    template = {"chat_template": "".join(f'{{{{ "{token}" }}}}' for token in CALL_TOKENS.values())}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    added = {"added_tokens": [{"id": 7, "content": token} for token in tokens]}
    (folder / "tokenizer.json").write_text(json.dumps(added, ensure_ascii=is_ascii), encoding="utf-8")
    return folder


def format_of(folder: Path, *sets: str) -> str | None:
    return call_format_of(load([QUICKSTART], sets).recipe, folder)


def test_every_format_of_a_family_is_one_that_a_recipe_can_set() -> None:
    formats = {name: family.call_format for name, family in FAMILIES.items()}
    assert {form for form in formats.values() if form} == set(get_args(CallFormat))
    assert [name for name, form in formats.items() if form is None] == ["gemma2", "gemma3_text"]


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize(("family", "form"), [("llama", "llama3_json"), ("deepseek_v3", "deepseek_v3")])
def test_format_of_family_requires_its_token(tmp_path: Path, family: str, form: str, *, is_ascii: bool) -> None:
    with_token = model(tmp_path, family, tokens=["<eos>", CALL_TOKENS[form]], is_ascii=is_ascii)
    assert format_of(with_token) is None  # no environment
    assert format_of(with_token, PYTHON) == format_of(with_token, TOOLS) == form
    without = model(tmp_path, family, tokens=["<eos>"], is_ascii=is_ascii)
    assert format_of(without, PYTHON) is None  # it needs no tools
    with pytest.raises(RecipeError, match=r"`environment` has tools, but the model in .* has no format") as caught:
        format_of(without, TOOLS)
    assert "--set 'environment.call_format=\"hermes\"'" in str(caught.value.hint)
    assert format_of(without, TOOLS, "environment.call_format='hermes'") == "hermes"
    with pytest.raises(RecipeError, match=f"`environment.call_format` is `{form}`, which needs the token"):
        format_of(without, PYTHON, f"environment.call_format='{form}'")


def test_evaluations_have_the_same_format_as_training(tmp_path: Path) -> None:
    folder = model(tmp_path, "gemma2", tokens=CALL_TOKENS.values())
    assert format_of(folder, PYTHON, f"eval.{TOOLS}", "eval.environment.call_format='mistral'") == "mistral"
    assert format_of(folder, PYTHON, "environment.call_format='hermes'", "eval.environment={kind='none'}") == "hermes"
    other = "eval.environment.call_format='mistral'"
    with pytest.raises(RecipeError, match="different formats of tool calls: hermes, mistral") as caught:
        format_of(folder, TOOLS, "environment.call_format='hermes'", f"eval.{PYTHON}", other)
    assert "--set 'eval.environment.call_format=\"hermes\"'" in str(caught.value.hint)
    with pytest.raises(RecipeError, match=r"`eval\.environment` has tools, but"):
        format_of(folder, f"eval.{TOOLS}")


@pytest.mark.parametrize(
    ("name", "content"),
    [("added_tokens.json", b'{"[TOOL_CALLS]": 5}'), ("tokenizer.model", b"\n\x13\n\x0c[TOOL_CALLS]\x15\x00\x00")],
)
def test_token_may_be_in_another_file_of_the_tokenizer(tmp_path: Path, name: str, content: bytes) -> None:
    folder = model(tmp_path, "mistral")
    assert format_of(folder, PYTHON) is None
    (folder / name).write_bytes(content)
    assert format_of(folder, PYTHON) == "mistral"
