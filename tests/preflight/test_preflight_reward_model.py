"""Problems of a reward model are reported before anything starts."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ppoctl.recipe.loading.load import load
from ppoctl.start.preflight.check import check
from preflight.conftest import edit
from rewards.reward_models import QUICKSTART, reward_model

Break = Callable[[Path], object]
WRONG: dict[str, tuple[list[str], Break, str, str]] = {
    "no folder": ([], shutil.rmtree, "`reward.path` is `{judge}`: no such folder", "ls"),
    "no head": (
        [],
        lambda judge: edit(judge / "config.json", architectures=["Qwen2ForCausalLM"]),
        "`{judge}` is not a reward model: its config.json names Qwen2ForCausalLM, not a ...ForSequenceClassification",
        "grep -A1 architectures",
    ),
    "a lost head": ([], lambda judge: shutil.copy(QUICKSTART / "model.safetensors", judge), "score.weight", ""),
    "no weights": (
        [],
        lambda judge: (judge / "model.safetensors").unlink(),
        "`reward.path` is `{judge}`: the folder has neither model.safetensors nor its index",
        "ls",
    ),
    "no label is named": (
        ["reward.label="],
        lambda _: None,
        "`label` is ``; the reward model in `{judge}` has `bad`, `good`",
        "--set reward.label=good",
    ),
    "a label that it has not": (
        ["reward.label=fine"],
        lambda _: None,
        "`label` is `fine`; the reward model in `{judge}` has `bad`, `good`",
        "--set reward.label=good",
    ),
    "too few positions": (
        ["reward.max_tokens=513"],
        lambda _: None,
        "`reward.max_tokens` is `513`, but the reward model in `{judge}` has 512 positions",
        "--set reward.max_tokens=512",
    ),
    "no tokenizer": (
        [],
        lambda judge: [file.unlink() for file in judge.glob("tokenizer*")],
        "`reward.path` is `{judge}`: the folder has no tokenizer",
        "ls",
    ),
    "no template": (
        [],
        lambda judge: (judge / "chat_template.jinja").unlink(),
        "the reward model in `{judge}` has no chat template",
        "--set reward.template=text",
    ),
}


def said(folder: Path, *sets: str) -> list[tuple[str, str]]:
    reward = "reward={kind='model', path='judge', label='good'}"
    loaded = load([folder / "r.toml"], [reward, *sets], {})
    problems = check(loaded.recipe, lambda path: loaded.origins[".".join(path)], rows=False)
    return [(problem.what, problem.hint or "") for problem in problems]


def test_valid_reward_model_has_no_problems(folder: Path) -> None:
    reward_model(folder / "judge", "bad", "good")
    assert said(folder) == []
    (folder / "judge/chat_template.jinja").unlink()
    assert said(folder, "reward.template=text") == []


@pytest.mark.parametrize("case", WRONG)
def test_problem_of_reward_model_is_named(folder: Path, case: str) -> None:
    judge = reward_model(folder / "judge", "bad", "good")
    sets, break_it, says, hint = WRONG[case]
    break_it(judge)
    [found] = said(folder, *sets)
    assert says.format(judge=judge) in found[0]
    assert hint in found[1]
