"""Filtered samples (PF-PPO, Zhang et al. 2024, arXiv:2409.06957): the updates use rows that are sampled again, with
replacement, by their scores. Values, log-probs and advantages are those of all rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fakes.components import FEW_ROWS, fake_recipe
from ppoctl.algorithm.advantages import ADVANTAGES
from ppoctl.algorithm.forward import LOGPROBS, VALUES
from ppoctl.algorithm.generation import REWARD, ROLLOUT
from ppoctl.algorithm.stage_spec import StageParts, StageSpec
from ppoctl.algorithm.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithm.updates import ACTOR_UPDATE, CRITIC_UPDATE
from ppoctl.batch.records import Rewards, Rollouts, Selection
from ppoctl.batch.seeds import derive_seed
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Resample:
    """Stage that samples as many rows as there are, each with a probability proportional to exp(2 score)."""

    seed: int
    fingerprint: str
    name: str

    def run(self, rollouts: Rollouts, rewards: Rewards) -> Selection:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, rollouts.step, self.name))
        weights = (2 * rewards.scores).exp() * rewards.valid
        rows = torch.multinomial(weights, rollouts.num_seqs, replacement=True, generator=generator)
        return Selection(
            rounds=torch.ones_like(rows),
            rows=rows,
            prompt_ids=[rollouts.prompt_ids[row] for row in rows.tolist()],
            sample_indices=[rollouts.sample_indices[row] for row in rows.tolist()],
            is_full=True,
            summary={},
        )


@dataclass(frozen=True)
class ResampleSpec(StageSpec[Selection]):
    kind: ClassVar[str] = "selection"
    keys: ClassVar[tuple[str, ...]] = ("seed",)
    defines_rows: ClassVar[bool] = True

    def build(self, recipe: Recipe, parts: StageParts) -> Resample:
        return Resample(recipe.seed, self.fingerprint(recipe), self.name)


RESAMPLE = ResampleSpec("resample")


def _resampled_rows(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    rollouts = run_stage(ROLLOUT, actor, inputs.prompts)
    rewards = run_stage(REWARD, inputs.prompts, rollouts)
    values = run_stage(VALUES, critic, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, values, logprobs, inputs.carry)
    selection = run_stage(RESAMPLE, rollouts, rewards)
    taken = run_stage.take(selection, [rollouts])
    taken_advantages = run_stage.take(selection, [advantages])
    critic = run_stage(CRITIC_UPDATE, critic, taken, run_stage.take(selection, [values]), taken_advantages)
    actor = run_stage(ACTOR_UPDATE, actor, taken, run_stage.take(selection, [logprobs]), taken_advantages)
    return StepOutputs({"critic": critic, "actor": actor}, advantages.carry, ((rollouts, rewards),))


RESAMPLED_ROWS = StepFunction("resampled_rows", _resampled_rows)


def choose(recipe: Recipe, step: int) -> StepFunction:
    return RESAMPLED_ROWS


def recipe(**changes: Any) -> Recipe:
    """Return a recipe of three steps of four rows."""
    tables: Mapping[str, Any] = {
        "rollout": FEW_ROWS,
        "ppo": {"epochs": 2, "minibatch_seqs": 2, "kl": {"place": "reward", "coef": 0.05}},
    }
    return fake_recipe(**{**tables, **changes})
