"""Dynamic sampling (Yu et al. 2025, arXiv:2503.14476): rounds of generation until the step has enough groups whose
scores differ. There is no critic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fakes.components import FEW_ROWS, fake_recipe
from ppoctl.algorithm.advantages import ADVANTAGES
from ppoctl.algorithm.forward import LOGPROBS
from ppoctl.algorithm.generation import REWARD, ROLLOUT
from ppoctl.algorithm.stage_spec import ReportedMetric, StageParts, StageSpec, always
from ppoctl.algorithm.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithm.updates import ACTOR_UPDATE
from ppoctl.batch.records import Rewards, Rollouts, Selection
from ppoctl.metric_registry import Metric
from ppoctl.recipe.schema import Recipe

AT_MOST = 4
"""Maximum number of rounds of a step."""

KEPT_GROUPS = Metric("selection/groups", "groups", "groups that the step continues with")


@dataclass(frozen=True)
class KeepGroups:
    """Stage that selects the first groups, in the order of their prompts, whose scores are not all equal."""

    groups: int
    """Number of groups that a step requires."""
    fingerprint: str
    name: str

    def run(self, *records: Rollouts | Rewards) -> Selection:
        """Select from the rollouts and rewards of all rounds so far, which alternate."""
        found: dict[tuple[int, str], list[int]] = {}
        rounds = list(zip(records[::2], records[1::2], strict=True))
        ids: list[Rollouts] = []
        for number, (rollouts, rewards) in enumerate(rounds, start=1):
            assert isinstance(rollouts, Rollouts)
            assert isinstance(rewards, Rewards)
            ids.append(rollouts)
            for prompt in dict.fromkeys(rollouts.prompt_ids):
                rows = [row for row, other in enumerate(rollouts.prompt_ids) if other == prompt]
                scores = rewards.scores[torch.tensor(rows)]
                if bool((scores != scores[0]).any()):
                    found[number, prompt] = rows
        kept = dict(list(found.items())[: self.groups])
        places = [(number, row) for (number, _), rows in kept.items() for row in rows]
        return Selection(
            rounds=torch.tensor([number for number, _ in places], dtype=torch.int64),
            rows=torch.tensor([row for _, row in places], dtype=torch.int64),
            prompt_ids=[ids[number - 1].prompt_ids[row] for number, row in places],
            sample_indices=[ids[number - 1].sample_indices[row] for number, row in places],
            is_full=len(kept) == self.groups,
            summary={KEPT_GROUPS.name: float(len(kept))},
        )


@dataclass(frozen=True)
class KeepGroupsSpec(StageSpec[Selection]):
    kind: ClassVar[str] = "selection"
    keys: ClassVar[tuple[str, ...]] = ("rollout.prompts_per_step",)
    defines_rows: ClassVar[bool] = True

    def metrics(self, recipe: Recipe) -> tuple[ReportedMetric, ...]:
        return always(KEPT_GROUPS)

    def build(self, recipe: Recipe, parts: StageParts) -> KeepGroups:
        return KeepGroups(recipe.rollout.prompts_per_step, self.fingerprint(recipe), self.name)


KEEP_GROUPS = KeepGroupsSpec("keep_groups")


def with_rounds(at_most: int) -> StepFunction:
    """Return the step function with this maximum number of rounds."""

    def step(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
        actor = inputs.states["actor"]
        generated: list[tuple[Rollouts, Rewards]] = []
        for each in run_stage.rounds(at_most=at_most):
            prompts = inputs.prompts_of(each.number)
            rollouts = each(ROLLOUT, actor, prompts)
            rewards = each(REWARD, prompts, rollouts)
            generated.append((rollouts, rewards))
            kept = each(KEEP_GROUPS, *(record for pair in generated for record in pair))
            each.end_if(kept.is_full)
        rollouts = run_stage.take(kept, [pair[0] for pair in generated])
        rewards = run_stage.take(kept, [pair[1] for pair in generated])
        logprobs = run_stage(LOGPROBS, actor, rollouts)
        advantages = run_stage(ADVANTAGES, rollouts, rewards, None, logprobs, inputs.carry)
        actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages)
        return StepOutputs({"actor": actor}, advantages.carry, tuple(generated))

    return StepFunction("dynamic_sampling", step)


DYNAMIC_SAMPLING = with_rounds(AT_MOST)


def choose(recipe: Recipe, step: int) -> StepFunction:
    return DYNAMIC_SAMPLING


def recipe(**changes: Any) -> Recipe:
    """Return a recipe of three steps of two groups. With its seed, they have two rounds, one and three."""
    tables: Mapping[str, Any] = {
        "seed": 13,
        "critic": None,
        "rollout": FEW_ROWS,
        "ppo": {
            "epochs": 2,
            "minibatch_seqs": 2,
            "kl": {"place": "loss", "coef": 0.05},
            "advantages": {"kind": "grpo"},
        },
    }
    return fake_recipe(**{**tables, **changes})
