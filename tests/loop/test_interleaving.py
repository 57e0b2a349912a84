"""Training the critic before the actor equals the interleaved order: neither reads what the other changes."""

from pathlib import Path

import torch

from fakes.components import fake_recipe
from fakes.job import BuiltStages, Witness, open_run, play
from ppoctl.core.batch.records import Carry


def test_critic_before_actor_equals_actor_before_critic(tmp_path: Path) -> None:
    play(tmp_path / "story", fake_recipe(steps=1))
    wiring = open_run(tmp_path / "other", fake_recipe(steps=1), Witness())
    job = wiring.job
    stages, states = BuiltStages(job, 1), job.states
    actor, critic = states.initial["actor"], states.initial["critic"]
    rollouts = stages.rollout.run(actor, job.prompts(1))
    rewards = stages.reward.run(job.prompts(1), rollouts)
    values, logprobs = stages.values.run(critic, rollouts), stages.logprobs.run(actor, rollouts)
    advantages = stages.advantages.run(rollouts, rewards, values, logprobs, Carry(kl_coef=0.0))
    planned = {
        "critic": (stages.critic_update, critic, (values, advantages)),
        "actor": (stages.actor_update, actor, (logprobs, advantages)),
    }
    # The actor first, then the critic: if either read the other's new weights, the tables would differ.
    for role in ("actor", "critic"):
        stage, state, inputs = planned[role]
        stage.run(state, rollouts, *inputs)
    for role in ("actor", "critic"):
        saved = (tmp_path / f"story/states/{role}/000001/table.bin").read_bytes()
        assert torch.equal(
            states.engines[role].table.flatten(),  # type: ignore[attr-defined]
            torch.frombuffer(bytearray(saved), dtype=torch.float32),
        )
