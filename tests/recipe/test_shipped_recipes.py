"""Every bundled recipe is valid, and can be validated and planned without data, model, network or torch."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ppoctl.cli.manual.header import header_of, page
from ppoctl.cli.recipes import shipped
from ppoctl.plan.memory.estimate import estimate_here
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.parallel import devices
from ppoctl.recipe.schema import Recipe
from recipe import shipped as shipped_text
from recipe.conftest import SMALLEST
from recipe.shipped import SNAPSHOT, snapshot

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
FILES = sorted(RECIPES.rglob("*.toml"))
HEAVY = {"torch", "ray", "vllm", "megatron", "mlflow", "transformers", "numpy", "huggingface_hub", "datasets"}
SCRIPT = """
import contextlib, io, json, socket, sys
def refuse(*_):
    raise OSError("no network")
socket.socket.connect = socket.getaddrinfo = refuse
from ppoctl.cli.app import run
answers = {}
for words in json.loads(sys.argv[1]):
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = run([*words, "--json"])
    answers[" ".join(words)] = code, json.loads(told.getvalue())
print(json.dumps([answers, sorted({name.split(".")[0] for name in sys.modules})]))
"""


@cache
def recipe_of(file: Path) -> Recipe:
    return shipped_text.load_without_data(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(RECIPES)))
def test_shipped_recipe_is_valid_and_has_header(file: Path) -> None:
    recipe = recipe_of(file)
    inside = file.parent.name if file.parent != RECIPES else ""
    assert recipe.name in (file.stem, f"{inside}-{file.stem}")
    head = header_of(file.read_text("utf-8"))
    assert 20 < len(head.purpose) <= 90, "it begins with what it is for"
    assert {"Teaches", "Needs", "Costs", "Source"} <= set(head.parts)
    assert all(head.parts.values())
    assert "Published" not in head.parts or recipe.expect, "what is published is expected"


def test_shipped_recipes_match_snapshot() -> None:
    assert SNAPSHOT.read_text("utf-8") == snapshot(FILES, recipe_of), (
        "python tests/recipe/shipped.py, if that is meant"
    )


def test_changed_default_changes_one_snapshot_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recipes omit a key; then one of them gets another value."""
    monkeypatch.setattr(shipped_text, "RECIPES", tmp_path)
    text = SMALLEST.replace('"base"', '"/base"').replace('"train.jsonl"', '"/train.jsonl"')
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.toml").write_text(text.replace("small", name), "utf-8")
    files = sorted(tmp_path.glob("*.toml"))
    before = snapshot(files).splitlines()
    (tmp_path / "c.toml").write_text(f"{text.replace('small', 'c')}[eval]\nevery_steps = 7\n", "utf-8")
    after = snapshot(files).splitlines()
    assert [line for line in after if line not in before] == ["eval.every_steps = 7"]


def test_recipes_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "recipes.md").read_text("utf-8") == page(shipped()), "make docs"


def test_annotated_recipe_is_valid_and_explained() -> None:
    file = ROOT / "docs" / "annotated.toml"
    assert load([file], (), {"PPOCTL_DATA": "/data"}).recipe.name == "annotated"
    lines = [line for line in file.read_text("utf-8").splitlines() if " = " in line and not line.startswith("#")]
    assert len([line for line in lines if " # " in line]) > len(lines) / 2


def test_recipe_header_ends_with_its_comment() -> None:
    head = header_of("# For this\n# Teaches: one\n#   thing\n# Source: ours\nname = 1\n# Costs: no part\n")
    assert (head.purpose, head.parts) == ("For this", {"Teaches": "one thing", "Source": "ours"})


def test_run_names_of_recipes_are_unique() -> None:
    names = [recipe_of(file).name for file in FILES]
    assert len(set(names)) == len(names) >= 3


def told_where_nothing_is(
    commands: list[list[str]], folder: Path
) -> tuple[dict[str, tuple[int, dict[str, Any]]], list[str]]:
    """Run commands in a process without data, models and network. Return their exit code and JSON, and the packages
    that they loaded."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PPOCTL", "HF_"))}
    environ |= {"PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(folder), "HOME": str(folder)}
    words = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, env=environ, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    answers, loaded = json.loads(done.stdout)
    return answers, loaded


FEW = ("calculator-small", "dsr1-7b")
"""Recipes with a model that ships and one of a hub, and with an environment."""


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([file for file in FILES if file.stem in FEW], id="few"),
        pytest.param(FILES, id="all", marks=pytest.mark.ci("few, test_recipe_fits_gpus_named_in_its_header")),
    ],
)
def test_recipes_validate_and_plan_without_data_or_model(tmp_path: Path, files: list[Path]) -> None:
    assert len(files) >= len(FEW)
    commands = [[command, str(file)] for command in ("validate", "plan") for file in files]
    answers, loaded = told_where_nothing_is(commands, tmp_path)
    assert {name: output for name, (code, output) in answers.items() if code} == {}
    notes = "\n".join(note["what"] for note in answers[f"validate {RECIPES / 'dsr1-7b.toml'}"][1]["findings"])
    assert "it has not been fetched; not checked" in notes
    assert "from a config.json that ships with the recipes" in notes
    assert "`PPOCTL_DATA` is not set in the environment; not checked" in notes
    for file in files:
        planned = answers[f"plan {file}"][1]
        assert planned["memory"] is not None, f"{file}: no config.json of its model ships"
    assert not HEAVY & set(loaded)


USABLE_GIB = {24: 22.5, 32: 31.0, 48: 47.0, 80: 79.0}
"""Minimum memory of a GPU in GiB, by the GB of its name."""
SPARE_GIB = 1.5
"""Memory that a bundled recipe leaves free, for what the estimates of `plan` do not know."""


def test_recipe_fits_gpus_named_in_its_header() -> None:
    named = {
        file: re.match(r"(\d+) GPUs? of (\d+) GB\b", header_of(file.read_text("utf-8")).parts["Needs"])
        for file in FILES
    }
    on_cpu = {"calculator-small", "gsm8k-smoke", "quickstart", "quickstart-grpo"}
    assert {file.stem for file, match in named.items() if match is None} == on_cpu
    for file, match in named.items():
        if match is None:
            continue
        gib = USABLE_GIB[int(match[2])]
        assert devices(recipe_of(file)) == int(match[1]), file
        memory = estimate_here(recipe_of(file), gib)
        assert memory is not None, file
        assert max(pool.fullest.bytes for pool in memory.places) / 2**30 + SPARE_GIB <= gib, file
