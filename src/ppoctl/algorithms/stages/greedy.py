"""Baselines of ReMax: 22-greedy_rollout, 24-greedy_reward, and the advantages that read them."""

from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.stages.advantages import AdvantagesStage
from ppoctl.algorithms.stages.reward import RewardStage
from ppoctl.algorithms.stages.rollout import RolloutStage
from ppoctl.algorithms.stages.shaping import ShapedRewards, apply_shaping
from ppoctl.core.batch.records import (
    Advantages,
    Carry,
    GreedyRewards,
    GreedyRollouts,
    Logprobs,
    Rewards,
    Rollouts,
)
from ppoctl.core.errors import RewardError

Greedy = TypeVar("Greedy", GreedyRollouts, GreedyRewards)
"""Record of greedy responses."""


@dataclass(frozen=True)
class GreedyStage(Generic[Greedy]):
    """Stage that generates or scores greedy responses. It only changes the kind of the record, so that the record
    does not report the metrics of the samples."""

    stage: RolloutStage | RewardStage
    kind: type[Greedy]

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def fingerprint(self) -> str:
        return self.stage.fingerprint

    def run(self, *inputs: Any) -> Greedy:
        record = self.stage.run(*inputs)
        return self.kind(**{field.name: getattr(record, field.name) for field in fields(record)})


@dataclass(frozen=True)
class RemaxAdvantagesStage:
    """Stage that computes advantages with the reward of the greedy response to the same prompt as the baseline."""

    advantages: AdvantagesStage

    @property
    def name(self) -> str:
        return self.advantages.name

    @property
    def fingerprint(self) -> str:
        return self.advantages.fingerprint

    def run(
        self,
        rollouts: Rollouts,
        rewards: Rewards,
        logprobs: Logprobs,
        carry: Carry,
        greedy: GreedyRollouts,
        greedy_rewards: GreedyRewards,
    ) -> Advantages:
        """Return the advantages. A response whose prompt has no baseline is treated as a response without a score.

        The greedy rewards are shaped like the rewards of the step, with the same moments, and do not join the
        moments. Raises RewardError if no response has both a score and a baseline.
        """
        steps = self.advantages.reward_steps
        shaped = apply_shaping(rewards, rollouts, carry, steps)
        baselines, is_known = _baselines(
            rollouts, apply_shaping(greedy_rewards, greedy, shaped.carry, steps, joins_moments=False)
        )
        if not bool((shaped.valid & is_known).any()):
            raise RewardError(
                f"no prompt of step {rollouts.step} has both a response and a greedy response with a score: no "
                "response is left to train on",
                hint="the rollouts are saved: fix the reward, then run `ppoctl resume RUN`",
            )
        return self.advantages.of_shaped(
            replace(shaped, valid=shaped.valid & is_known), rewards, None, logprobs, baselines
        )


def _baselines(rollouts: Rollouts, greedy: ShapedRewards) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """Return the reward of the greedy response to the prompt of each row (0 without a score), and whether it has a
    score."""
    row_of = {prompt: row for row, prompt in enumerate(greedy.rollouts.prompt_ids)}
    rows = torch.tensor([row_of[prompt] for prompt in rollouts.prompt_ids])
    return greedy.per_response[rows], greedy.valid[rows]
