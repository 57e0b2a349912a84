"""Problems of the peft adapter that a role starts from are reported before anything starts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ppoctl.core.errors import MissingAssetError, RecipeError
from ppoctl.core.finding import Finding
from ppoctl.models.convert.adapters import adapters
from ppoctl.models.convert.peft_config import PeftTargets, write_peft_config
from ppoctl.models.lora import Lora
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable import Trainable
from ppoctl.recipe.loading.load import load
from ppoctl.start.preflight.check import check
from preflight.conftest import MODEL, edit

LORA = Lora(2, 6.0, ("q_proj", "v_proj"))
TABLE = 'actor.train={lora={rank=2, alpha=6, targets=["q_proj", "v_proj"], start="adapter"}}'


@pytest.fixture
def adapter(folder: Path) -> Path:
    """Return an adapter of the model `base` in the working directory."""
    made, shape = folder / "adapter", read_shape(MODEL)
    made.mkdir()
    write_peft_config(made, LORA, "token", PeftTargets(["q_proj", "v_proj"], []), "base")
    found = [one for each in adapters(shape, Trainable(lora=LORA)) for one in (each.a, each.b)]
    tensors = {f"base_model.model.{one.name}": torch.ones(one.shape) for one in found}
    save_file(tensors, made / "adapter_model.safetensors")
    return made


def found_with(*sets: str) -> list[Finding]:
    return check(load([Path("r.toml")], [TABLE, *sets], environ={}).recipe, rows=False)


def test_adapter_that_fits_has_no_problem(adapter: Path) -> None:
    assert not found_with()


def test_adapter_with_other_settings_is_a_problem_of_its_key(adapter: Path) -> None:
    [problem] = found_with("actor.train.lora.rank=3")
    assert problem.error is RecipeError
    assert problem.what == (
        f"`actor.train.lora.start` is `{adapter}`, an adapter with rank `2`, but `actor.train.lora.rank` is `3`"
    )
    assert problem.hint == "--set actor.train.lora.rank=2"


def test_adapter_of_another_kind_is_a_problem(adapter: Path) -> None:
    edit(adapter / "adapter_config.json", use_dora=True)
    [problem] = found_with()
    assert "`use_dora` in" in problem.what
    (adapter / "adapter_config.json").unlink()
    [problem] = found_with()
    assert f"`{adapter}` is not a peft adapter" in problem.what


def test_missing_adapter_is_a_problem(folder: Path) -> None:
    [problem] = found_with()
    assert f"`actor.train.lora.start` is `{folder / 'adapter'}`: no such folder" in problem.what
    [problem] = found_with('actor.train.lora.start="nobody/adapter"')
    assert problem.error is MissingAssetError
    assert "it has not been fetched" in problem.what


def test_relative_path_of_an_adapter_starts_at_the_recipe_file(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (adapter.parent / "lora.toml").write_text(
        '[actor.train.lora]\nrank = 2\nalpha = 6\ntargets = ["q_proj", "v_proj"]\nstart = "adapter"\n', "utf-8"
    )
    monkeypatch.chdir("base")
    recipe = load([Path("../r.toml"), Path("../lora.toml")], environ={}).recipe
    assert not check(recipe, rows=False)
