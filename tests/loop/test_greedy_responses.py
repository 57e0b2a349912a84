"""A run with greedy responses: they are in records of their own, and nowhere else."""

import json
from pathlib import Path

import torch

from fakes.bigram import END, initial_table
from fakes.components import CountingPrompts, fake_recipe
from fakes.job import play
from ppoctl.core.batch.records import Advantages, GreedyRewards, GreedyRollouts, Rewards, Rollouts
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import Journal, read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.sample_join import StepJoin
from ppoctl.store.stage_runner import load_record

ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 1, "max_prompt_tokens": 4, "max_new_tokens": 6, "top_k": 5}


def record(paths: RunPaths, stage: str) -> object:
    return load_record(paths, 1, stage, manifests.require(paths.stage(1, stage)))


def test_greedy_responses_are_baselines_and_no_samples_of_the_step(tmp_path: Path) -> None:
    ppo = {"epochs": 1, "minibatch_seqs": 4, "advantages": {"kind": "remax"}}
    wiring = play(tmp_path / "run", fake_recipe(steps=1, critic=None, ppo=ppo, rollout=ROLLOUT))
    paths = RunPaths(tmp_path / "run")
    rollouts, rewards = record(paths, "rollout"), record(paths, "reward")
    greedy, greedy_rewards = record(paths, "greedy_rollout"), record(paths, "greedy_reward")
    advantages = record(paths, "advantages")
    assert isinstance(rollouts, Rollouts)
    assert isinstance(rewards, Rewards)
    assert isinstance(greedy, GreedyRollouts)
    assert isinstance(greedy_rewards, GreedyRewards)
    assert isinstance(advantages, Advantages)
    # The most likely token after each token, up to the end token or six tokens.
    for row, prompt in enumerate(CountingPrompts(4).prompts_for(1).rows):
        tokens = [prompt.token_ids[-1]]
        while len(tokens) <= 6 and tokens[-1] != END:
            tokens.append(int(initial_table("actor")[tokens[-1]].argmax()))
        assert greedy.tokens[row, : greedy.lengths[row]].tolist() == tokens[1:]
    assert not torch.equal(greedy.tokens, rollouts.tokens)
    assert greedy.prompt_ids == rollouts.prompt_ids
    relative = (rewards.scores - greedy_rewards.scores)[:, None] * rollouts.mask
    assert torch.equal(advantages.advantages, relative)
    # Ledger, samples of the step, and metrics of the rollout and the rewards are those of the sampled responses.
    lines = [json.loads(line) for line in paths.ledger.read_text().splitlines()]
    assert [line["seed"] for line in lines] == rollouts.seeds.tolist()
    joined = StepJoin.of(RecordedRun(paths), 1)
    assert joined.samples == tuple(("rollout", row) for row in range(4))
    assert [joined.joined("advantages").value("shaped", row) for row in range(4)] == rewards.scores.tolist()
    metrics = Journal(paths, wiring.job.runner.attempt).metrics(1)
    assert (metrics["rollout/tokens"], metrics["baseline/tokens"]) == (rollouts.lengths.sum(), greedy.lengths.sum())
    assert metrics["reward/score_mean"] == float(rewards.scores.mean())
    assert metrics["baseline/score_mean"] == float(greedy_rewards.scores.mean())
    # The weights are sent once before the update and once after it, for the evaluation.
    assert wiring.generator.syncs == 2  # type: ignore[attr-defined]
    lines = [line for line in read_lines(paths.journal) if "stage" in line]
    clocked = {line["stage"]: line["clocked"] for line in lines if line["step"] == 1}
    assert clocked["greedy_rollout"] == clocked["greedy_reward"] == {}
