"""Functions of the user are tried on the first rows before a run imports its libraries."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.errors import RewardError
from ppoctl.recipe.schema import Recipe
from ppoctl.start.preflight.own_functions import require_usable
from wiring.harness import with_keys

QUICK = Path(__file__).parents[2] / "recipes" / "quickstart"
FUNCTIONS = """
def sound(sample, bonus=0.0):
    return {"score": float(sample.truth in sample.response), "words": float(len(sample.token_ids))}

def raises(sample):
    return float(sample.fields["missing"])

def two(sample, other):
    return 1.0

def taken(sample):
    return {"score": 1.0, "length": 2.0}

def metrics(samples, other):
    return {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}", "kind": "ab"[n % 2]} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def recipe(folder: Path, reward: dict[str, Any], **keys: Any) -> Recipe:
    train = {
        "format": "columns", "path": str(folder / "train.jsonl"), "prompt": "question", "answer": "answer",
        "fields": ["kind"],
    }  # fmt: skip
    model = {"path": str(QUICK / "model")}
    return Recipe.model_validate(with_keys({"reward": reward, "data": {"train": train}, "model": model, **keys}))


def python(folder: Path, name: str) -> dict[str, str]:
    return {"kind": "python", "function": f"{folder}/own.py:{name}"}


SAYS = {
    "sound": None,
    "raises": r"has no score to train on for row `train/.*KeyError: 'missing' \(own.py:6, in `raises`",
    "two": r"missing a required argument: 'other'",
    "taken": r"the reward returns a metric `length`",
    "nothing": r"has no `nothing`",
}
FIRST = [*(("alone", name) for name in SAYS), ("part", "raises"), ("case", "raises"), ("case", "sound")]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(*each, marks=[] if each in FIRST else [pytest.mark.ci("alone; other names of this place")])
        for each in product(("alone", "part", "case"), SAYS)
    ],
)
def test_unusable_reward_function_is_found_on_first_rows(folder: Path, place: str, name: str) -> None:
    says, own, other = SAYS[name], python(folder, name), {"kind": "length", "at_most": 9}
    reward = {
        "alone": own,
        "part": {"kind": "sum", "parts": {"own": own, "short": other}},
        "case": {"kind": "choose", "by": "kind", "cases": {"a": other, "b": own}},
    }[place]
    if says is None:
        require_usable(recipe(folder, reward))
        return
    with pytest.raises(RewardError, match=says):
        require_usable(recipe(folder, reward))
