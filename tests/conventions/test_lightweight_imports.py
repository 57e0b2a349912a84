"""Commands that only read import no engine, and answer quickly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conventions.conftest import PACKAGE, ROOT

HEAVY = (
    "torch",
    "ray",
    "vllm",
    "megatron",
    "mlflow",
    "transformers",
    "numpy",
    "pyarrow",
    "huggingface_hub",
    "jaxtyping",
)
RECIPE = str(ROOT / "recipes" / "quickstart.toml")
ROWS = f"data.train.path={ROOT}/recipes/quickstart/test.jsonl"
READ = (RECIPE, "--set", ROWS, "--set", "data.train.max_rows=128", "--set", "data.eval.heldout.max_rows=8")
"""The recipe with the rows of one step."""
SCRIPT = """
import json, sys
from ppoctl.cli.app import run
seen = set()
for words in json.loads(sys.argv[1]):
    code = run(words)
    loaded = {name.split(".")[0] for name in sys.modules}
    print("\\n" + json.dumps({"words": words, "code": code, "loaded": sorted(loaded - seen)}))
    seen = loaded
"""


def front(*commands: tuple[str, ...]) -> dict[tuple[str, ...], dict[str, object]]:
    """Run the commands in one process; return what each returned and what it was first to import."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PPOCTL_DATA": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)], capture_output=True, text=True, env=env, check=False
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"words": ')]
    assert len(reports) == len(commands), done.stderr
    return {tuple(each["words"]): each for each in reports}


COMMANDS: list[tuple[tuple[str, ...], int | None]] = [
    (("--help",), 0),
    (("train", "--help"), 0),
    (("validate", *READ, "--set", "model.path=org/name"), None),
    (("validate", *READ), 0),
    (("validate", *READ, "--here"), None),
    (("validate", *READ, "--stage"), 0),
    (("plan", *READ), 0),
    (("preview", *READ), 0),
    (("train", *READ, "--set", "ppo.minibatch_seqs=3"), 2),
    (("train", RECIPE, "--set", "model.path=org/name"), 3),
    (("rollout", RECIPE, "--set", "data.train.path=none.jsonl"), 3),
    (("eval", RECIPE, "--ckpt", RECIPE, "--out", RECIPE), 2),
    (("convert-ckpt", "/nowhere", RECIPE, "--to", "hf"), 2),
    (("status", "/nowhere"), None),
    (("logs", "/nowhere"), 2),
    (("runs", "/nowhere"), 2),
    (("runs", "/"), 0),
    (("stop", "/nowhere"), 2),
    (("report", "/nowhere"), 2),
    (("diagnose", "/nowhere"), 2),
    (("doctor",), None),
    (("recipes", "list"), 0),
    (("recipes", "algorithms"), 0),
]

TRIAL = ("validate", *READ, "--reward", "--rows", "2")


@pytest.fixture(scope="module")
def commands() -> dict[tuple[str, ...], dict[str, object]]:
    """All commands in one process, one after the other."""
    return front(*(words for words, _ in COMMANDS))


@pytest.mark.parametrize(("words", "code"), COMMANDS, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_reading_commands_import_no_engine(
    commands: dict[tuple[str, ...], dict[str, object]], words: tuple[str, ...], code: int | None
) -> None:
    found = commands[words]
    assert code is None or found["code"] == code
    assert isinstance(found["loaded"], list)
    assert not set(HEAVY) & set(found["loaded"])


@pytest.mark.ci("test_imports_follow_package_table, test_validate_tries_the_reward_on_training_rows")
def test_reward_trial_runs_without_megatron() -> None:
    found = front(TRIAL)[TRIAL]
    assert found["code"] == 0
    assert isinstance(found["loaded"], list)
    assert not {"megatron", "vllm", "ray"} & set(found["loaded"])


def test_help_imports_neither_pydantic_nor_rich() -> None:
    loaded = front(("--help",))["--help",]["loaded"]
    assert isinstance(loaded, list)
    assert not {"pydantic", "rich"} & set(loaded)


def test_wheel_contains_packages_recipes_and_batch_script() -> None:
    """An installed wheel has the files of a checkout. `packages` is listed explicitly because recipes/ is outside
    src/."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    source = ROOT / "src"
    packages = {".".join(file.parent.relative_to(source).parts) for file in source.rglob("__init__.py")}
    tables = {
        file
        for package in ("cli/manual", "recipe")
        for pattern in settings["package-data"][f"ppoctl.{package.replace('/', '.')}"]
        for file in PACKAGE.glob(f"{package}/{pattern}")
    }
    assert tables == set(PACKAGE.rglob("*.toml"))
    assert len(tables) == 8
    outside = {"ppoctl._recipes": ROOT / "recipes", "ppoctl._slurm": ROOT / "slurm"}
    assert set(settings["packages"]) == packages | set(outside)
    for package, folder in outside.items():
        assert settings["package-dir"][package] == folder.name
        patterns = settings["package-data"][package]
        shipped = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
        assert shipped >= {file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"}


def test_suite_imports_ppoctl_from_checkout() -> None:
    import ppoctl

    assert Path(ppoctl.__file__).parent == ROOT / "src" / "ppoctl"
