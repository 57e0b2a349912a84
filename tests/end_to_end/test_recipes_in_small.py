"""Every shipped recipe trains for two steps on a CPU: its algorithm and reward unchanged, with a tiny model of its
family, few rows, short responses and one process."""

import json
import re
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from end_to_end.cli_process import Forked, fresh
from end_to_end.real_drill import ROOT
from end_to_end.tiny_models import tiny_model
from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.key_path import dotted
from ppoctl.data.row_tables import ColumnRows, DialogueRows, Gsm8kRows, SingleTable, VerlRows
from ppoctl.models.shape_reader import shape_if_known
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.rules.rows_rules import tables_of_rows
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.choose_reward import ChooseReward
from ppoctl.rewards.code import CodeScorer
from ppoctl.rewards.model_reward import ModelScorer
from ppoctl.rewards.python_reward import PythonScorer
from ppoctl.rewards.scorer_table import RewardTable, ScorerTable
from ppoctl.store.journal import read_lines
from rewards.classifiers import classifier
from rewards.reward_models import reward_model

RECIPES = ROOT / "recipes"
FILES = (RECIPES / "dsr1-7b.toml", *sorted(RECIPES.glob("*/*.toml")))
NAMES = [file.relative_to(RECIPES).with_suffix("").as_posix() for file in FILES]
"""All recipes except the quickstart, which has its own tests, and the smoke recipe, which is small already."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def rows_for(table: SingleTable, reward: RewardTable, folder: Path) -> Path:
    """Write a file with a few rows in the format of a table; if a field chooses the reward, rows for each of its
    values."""
    pairs = [(f"{n} + {n}", str(2 * n)) for n in range(1, 9)]
    if isinstance(table, Gsm8kRows):
        file = folder / "rows.jsonl"
        lines = [json.dumps({"question": question, "answer": f"so\n#### {answer}"}) for question, answer in pairs]
        file.write_text("\n".join(lines), "utf-8")
        return file
    if isinstance(table, DialogueRows):
        file = folder / "dialogues.jsonl"
        prompts = [(f"\n\nHuman: {question}\n\nAssistant:", answer) for question, answer in pairs]
        lines = [json.dumps({"chosen": f"{text} {answer}", "rejected": f"{text} no"}) for text, answer in prompts]
        file.write_text("\n".join(lines), "utf-8")
        return file
    assert isinstance(table, ColumnRows | VerlRows), table
    file = folder / "rows.parquet"
    cases = cycle(reward.cases.items() if isinstance(reward, ChooseReward) else [("any", reward)])
    tests = {"inputs": ["1\n"], "outputs": ["1\n"]}
    rows: list[dict[str, Any]] = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"ground_truth": json.dumps(tests) if isinstance(case, CodeScorer) else answer},
        }
        for (question, answer), (source, case) in zip(pairs, cases, strict=False)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return file


def scorer_in_small(scorer: ScorerTable, folder: Path) -> dict[str, str]:
    """Return settings of a scorer that give it a tiny model, or one process."""
    if isinstance(scorer, ModelScorer):
        judge = str(reward_model(folder / "judge"))
        return {"path": judge, "dtype": "float32", "max_tokens": "256", "parallel": "{}"}
    if isinstance(scorer, PythonScorer):
        judge = str(classifier(folder / "judge", "NEGATIVE", "POSITIVE"))
        return {"workers": "1", "options": f'{{classifier="{judge}"}}'}
    return {"workers": "1"}


def in_small(recipe: Recipe, model: Path, folder: Path) -> dict[str, str]:
    """Return settings that change sizes and devices, but not the algorithm."""
    samples = min(recipe.rollout.samples_per_prompt, 2)
    small = {
        "steps": "2", "model.path": str(model), "model.dtype": "float32", "expect": "{}", "tracking": '{kind="none"}',
        "rollout.prompts_per_step": "8", "rollout.samples_per_prompt": str(samples),
        "rollout.max_prompt_tokens": "220", "rollout.max_new_tokens": "16", "rollout.stop_strings": '["e"]',
        "ppo.minibatch_seqs": str(4 * samples), "generator.engines": "1",
        "generator.tensor": "1", "checkpoint.every_steps": "2", "eval.every_steps": "2",
        "eval.samples_per_prompt": str(min(recipe.eval.samples_per_prompt, 2)),
        "checkpoint.reshardable": "full",
    }  # fmt: skip
    for key, table in tables_of_rows(recipe):
        small[dotted((*key, "path"))] = str(rows_for(table, recipe.reward, folder))
    for of, role in recipe.trained.items():
        small[f"{of}.batching"] = (
            "{max_tokens_per_microbatch=512}" if isinstance(role.batching, ByTokens) else "{microbatch_seqs=2}"
        )
        small[f"{of}.parallel"] = "{}"
        if role.train is not None:
            small[f"{of}.train.top_layers"] = "1"  # of two
        if role.optimizer.lr_warmup_updates:
            small[f"{of}.optimizer.lr_warmup_updates"] = "2"
        if role.optimizer.lr_warmup_frac:
            small[f"{of}.optimizer.lr_warmup_frac"] = "0.5"
    for below, scorer in recipe.reward.scorers.items():
        small |= {dotted(("reward", *below, key)): value for key, value in scorer_in_small(scorer, folder).items()}
    if recipe.cluster.placement == "apart":
        small["cluster"] = "{}"  # without Ray
    if recipe.ppo.critic_only_steps:
        small["ppo.critic_only_steps"] = "1"
    if recipe.rollout.groups is not None:
        # A tiny model has no right response, so that no group has different scores: every group is kept.
        small |= {"rollout.groups.round_prompts": "8", "rollout.groups.keep": "{min=0, max=1}"}
    if recipe.rollout.max_window_tokens is not None:
        small["rollout.max_window_tokens"] = "230"
    if recipe.reward.overlong is not None:
        small |= {"reward.overlong.max_tokens": "12", "reward.overlong.buffer_tokens": "8"}
    return small


def without_service(file: Path, folder: Path) -> Path:
    """Return the recipe with a local sandbox in place of a code execution service."""
    text, found = re.subn(r'(?m)^sandbox *= "fusion"\nurl .*$', 'sandbox = "namespaces"', file.read_text("utf-8"))
    if found:
        file = folder / file.name
        file.write_text(text, "utf-8")
    return file


@pytest.mark.ci("test_alternatives.py")
@pytest.mark.sampled(1)
@pytest.mark.minutes(0.5)
@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipe_trains_with_a_tiny_model(tmp_path: Path, forked: Forked, name: str) -> None:
    file = without_service(RECIPES / f"{name}.toml", tmp_path)
    recipe = load([file], (), {"PPOCTL_DATA": "/data"}).recipe
    shape = shape_if_known(recipe.model.path)
    assert shape is not None
    model = tiny_model(shape.family, tmp_path / "model")
    sets = [word for key, value in in_small(recipe, model, tmp_path).items() for word in ("--set", f"{key}={value}")]
    without = [word for each in recipe.requires for word in ("--without", each)]
    has_programs = any(isinstance(scorer, CodeScorer) for scorer in recipe.reward.scorers.values())
    # A sandbox starts the interpreter that it runs in, and a forked process has a stand-in for one.
    done = (fresh if has_programs else forked)(tmp_path, "train", str(file), *sets, *without)
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_lines(tmp_path / "runs" / recipe.name / "journal.jsonl") if "stage" in line]
    trained = {1, 2} - set(range(1, min(recipe.ppo.critic_only_steps, 1) + 1))
    assert {line["step"] for line in lines if line["stage"] == "actor_update"} == trained
    metrics = {metric: value for line in lines for metric, value in line["figures"].items()}
    # The engine that generated step 2 held the weights that step 1 trained.
    assert metrics["mismatch/gap_max_abs"] < 1e-3
