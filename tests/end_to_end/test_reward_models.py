"""A reward model on the real engines, from the command line: PPO raises its score; a trained critic can serve as one;
it is offloaded and reloaded with the other roles, in one process and in several; and a kill loses nothing."""

from pathlib import Path

import pytest

from end_to_end.cli_process import Forked
from end_to_end.real_drill import ROOT, real_recipe
from end_to_end.test_real_engines import reached, start_drill
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths
from rewards.reward_models import reward_model

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


def metrics_by_step(paths: RunPaths, stage: str) -> dict[int, dict[str, float]]:
    """Return the metrics of a stage, by step."""
    return {line["step"]: line["figures"] for line in read_lines(paths.journal) if line.get("stage") == stage}


@pytest.mark.minutes(1)
def test_ppo_raises_model_score_and_its_critic_scores_another_run(tmp_path: Path, forked: Forked) -> None:
    (tmp_path / "judged.toml").write_text(
        f"""
        [reward]
        kind  = "model"
        path  = "{reward_model(tmp_path / "judge")}"
        dtype = "float32"
        [reward.moments]
        kind   = "running"
        center = true
        """,
        encoding="utf-8",
    )
    short = {
        "steps": 10, "rollout.prompts_per_step": 32, "ppo.minibatch_seqs": 16, "ppo.kl.place": "none",
        "actor.optimizer.lr": 7e-4, "critic.optimizer.lr": 3e-3, "eval.every_steps": 10, "checkpoint.every_steps": 10,
        "data.eval.heldout.max_rows": 64, "expect": "{}", "tracking.kind": "none",
    }  # fmt: skip
    sets = [word for key, value in short.items() for word in ("--set", f"{key}={value}")]
    recipe = str(ROOT / "recipes/quickstart.toml")
    forked.succeeds(tmp_path, "train", recipe, "judged.toml", *sets, "--set", "name=judged")
    scores = metrics_by_step(RunPaths(tmp_path / "runs/judged"), "eval")
    assert scores[10]["eval/heldout/greedy_pass_at_1"] > scores[0]["eval/heldout/greedy_pass_at_1"] + 0.1

    forked.succeeds(tmp_path, "convert-ckpt", "runs/judged", "critic", "--to", "hf", "--role", "critic")
    again = [*sets, "--set", "name=again", "--set", "reward.path=critic", "--set", "steps=1"]
    forked.succeeds(tmp_path, "train", recipe, "judged.toml", *again, "--set", "eval.at_start=false")
    scores_again = metrics_by_step(RunPaths(tmp_path / "runs/again"), "reward")[1]
    assert scores_again["reward/error_frac"] == 0
    assert scores_again["reward/score_std"] > 0


@pytest.mark.minutes(1.5)
def test_offloaded_sharded_and_vllm_reward_models_agree(tmp_path: Path, forked: Forked) -> None:
    reward = {"kind": "model", "path": str(reward_model(tmp_path / "judge", "bad", "good")), "label": "good"}
    runs = {
        "stays": ([], {}),
        "leaves": (["actor", "critic", "generator", "reward"], {}),
        "spread": (["actor", "critic", "generator", "reward"], {"parallel": {"tensor": 2}}),
        "served": ([], {"engine": "vllm"}),
    }
    for name, (leaving, keys) in runs.items():
        cluster = {"threads": 1, "offload": leaving}
        judged = {**reward, "dtype": "float32", **keys}
        recipe = real_recipe(every_steps=2, name=name, steps=2, cluster=cluster, reward=judged)
        (tmp_path / f"{name}.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
        forked.succeeds(tmp_path, "train", f"{name}.toml")
    stays, leaves, spread, served = (
        {stage: metrics_by_step(RunPaths(tmp_path / "runs" / name), stage) for stage in ("reward", "eval")}
        for name in runs
    )
    assert leaves == stays
    assert 0 < stays["reward"][2]["reward/score_mean"] < 1
    for other in (spread, served):
        assert other["reward"] == {step: pytest.approx(found, rel=1e-4) for step, found in stays["reward"].items()}


KILLS = [
    "1 reward inside",
    "2 rollout inside",
    "2 reward starts",
    "2 reward written",
    "3 values starts",
    "3 eval inside",
]


@pytest.mark.minutes(1)
def test_run_killed_during_model_scoring_ends_the_same(tmp_path: Path, forked: Forked) -> None:
    reward = {"kind": "model", "path": str(reward_model(tmp_path / "judge")), "dtype": "float32"}
    drill = start_drill(forked, tmp_path, tmp_path / "whole", {"every_steps": 3}, KILLS, reward=reward)
    assert reached(forked, tmp_path, drill) == KILLS
