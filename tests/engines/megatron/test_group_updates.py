"""A GRPO update of real ranks: its gradient equals that of transformers with advantages by hand, and does not depend
on padding, microbatches, order of the rows, or data ranks.

Two prompts with three responses each: uneven lengths, masked tokens inside responses, one response without a score.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import megatron_lab as lab
import pytest
import torch
from layout_lab import GRADIENT_GAP, gap, settings
from rank_pool import RankPool
from torch import Tensor

from ppoctl.algorithms.estimators.grpo import GrpoAdvantages
from ppoctl.algorithms.formulas.aggregation import TokenMean
from ppoctl.algorithms.formulas.learning_rate import LearningRate
from ppoctl.algorithms.formulas.policy_loss import PolicyClip
from ppoctl.algorithms.role_table import BySequences
from ppoctl.algorithms.stages.actor_update import ActorUpdateStage
from ppoctl.algorithms.stages.advantages import AdvantagesStage
from ppoctl.algorithms.stages.updates import MinibatchPlan, OptimizerSchedule
from ppoctl.core.batch.records import Carry, Logprobs, Rewards, Rollouts, State
from ppoctl.core.ports import OutputRequest
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.trainer import MegatronActor
from stages import stub_models
from tolerance import EXACT, FLOAT32

KIND = "qwen2-deep"
BATCH = lab.make_rollouts(prompts=(3, 3, 3, 5, 5, 5), lengths=(4, 7, 1, 5, 9, 2))
PROMPTS = ("a", "a", "a", "b", "b", "b")
SCORES, OUTCOMES = (1.0, 0.25, 4.0, 2.0, -1.0, 0.0), (0, 0, 0, 0, 0, 2)
# a: mean 1.75, std sqrt((0.75^2 + 1.5^2 + 2.25^2) / 2); b: mean 0.5, std sqrt(2 x 1.5^2); the last has no score.
STDS = (3.9375**0.5 + 1e-6, 4.5**0.5 + 1e-6)
ADVANTAGES = (-0.75 / STDS[0], -1.5 / STDS[0], 2.25 / STDS[0], 1.5 / STDS[1], -1.5 / STDS[1], 0.0)
STEP = replace(lab.STEP, lr=1e-4, eps=1e-6)


@dataclass(frozen=True)
class Setup:
    """Settings that must not change a result: order of the rows, columns of padding, microbatches, data ranks."""

    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    padding: int = 0
    microbatch_seqs: int = 2
    data: int = 1


SETUPS = {
    "padding": Setup(padding=4),
    "one row a microbatch": Setup(microbatch_seqs=1),
    "one microbatch": Setup(microbatch_seqs=6),
    "order": Setup(order=(4, 0, 5, 2, 1, 3)),
    "data ranks": Setup(data=2),
    "all": Setup((4, 0, 5, 2, 1, 3), 4, microbatch_seqs=1, data=2),
}


@pytest.fixture(scope="module")
def update(pool: RankPool, model: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    """Return what an update of some epochs computes, with the rows of all grids in the order of `BATCH`."""

    def updated(setup: Setup, epochs: int = 2) -> dict[str, Any]:
        batching = BySequences(microbatch_seqs=setup.microbatch_seqs, logits_chunk_tokens=5)
        made_from = replace(settings(model(KIND), "actor", ParallelTable(data=setup.data)), batching=batching)
        pool.open(made_from)
        trainer = MegatronActor(made_from, pool)
        trainer.start()
        rollouts = rollouts_of(setup)
        scored = trainer.logprobs(rollouts.sequences, OutputRequest(entropy=True))
        logprobs = Logprobs(stamp="", gap={}, actor=scored.primary, entropy=scored.entropy)
        rows = list(setup.order)
        rewards = Rewards(torch.tensor(SCORES)[rows], torch.tensor(OUTCOMES)[rows], {}, [""] * 6, [""] * 6)
        advantages = advantages_stage().run(rollouts, rewards, None, logprobs, Carry(0.0))
        record = update_stage(trainer, epochs).run(State("actor", 0, 0, "first"), rollouts, logprobs, advantages)
        width, back = BATCH.tokens.shape[1], torch.tensor(rows).argsort()
        assert not advantages.advantages[:, width:].any()
        return {
            "advantages": advantages.advantages[back, :width],
            "losses": record.per_minibatch["loss"],
            "norms": record.per_minibatch["grad_norm"],
            "clipped": record.per_minibatch["clip_frac"],
            "gradients": pool.gradients(),
        }

    return updated


@pytest.fixture(scope="module")
def expected(update: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return update(Setup())


def rollouts_of(setup: Setup) -> Rollouts:
    rows = list(setup.order)
    prompts = torch.split(BATCH.prompt_tokens, BATCH.prompt_lengths.tolist())

    def wider(grid: Tensor) -> Tensor:
        return torch.nn.functional.pad(grid[rows], (0, setup.padding))

    return Rollouts(
        prompt_tokens=torch.cat([prompts[row] for row in rows]),
        prompt_lengths=BATCH.prompt_lengths[rows],
        tokens=wider(BATCH.tokens),
        lengths=BATCH.lengths[rows],
        mask=wider(BATCH.mask),
        sampler_logprobs=torch.zeros(len(rows), BATCH.tokens.shape[1] + setup.padding),
        finish=torch.zeros(len(rows), dtype=torch.int64),
        seeds=torch.arange(len(rows)),
        prompt_ids=[PROMPTS[row] for row in rows],
        sample_indices=[row % 3 for row in rows],
        texts=[""] * len(rows),
        stamps=["actor@0:first"] * len(rows),
        sends=[1] * len(rows),
    )


def advantages_stage() -> AdvantagesStage:
    table = GrpoAdvantages(kind="grpo")
    return AdvantagesStage((), table.estimator(), table.whiten, "terminal", None, fingerprint="")


def update_stage(trainer: MegatronActor, epochs: int) -> ActorUpdateStage:
    schedule = OptimizerSchedule(LearningRate(STEP.lr, "constant", 0, epochs, 0.0), STEP)
    return ActorUpdateStage(
        models=cast(Any, stub_models.Models(cast(Any, trainer))),
        plan=MinibatchPlan(epochs, 6, None, schedule),
        scored=OutputRequest(),
        loss=PolicyClip(low=0.1, high=0.2, dual=None),
        aggregation=TokenMean(),
        entropy_coef=0.0,
        positive_nll_coef=0.0,
        penalty=None,
        fingerprint="",
    )


def test_gradient_of_grpo_update_matches_transformers(update: Callable[..., dict[str, Any]]) -> None:
    found = update(Setup(), epochs=1)
    has_score = torch.tensor(OUTCOMES) == 0
    mask = BATCH.mask & has_score[:, None]
    assert (BATCH.present & ~BATCH.mask)[has_score].any(), "a response has a hole"
    weights = torch.tensor(ADVANTAGES)[:, None] * mask
    FLOAT32.check(found["advantages"], weights)
    # The first ratio is 1: the loss is minus the mean advantage of the tokens, with the gradient of the log-probs.
    FLOAT32.check(found["losses"][0], -weights.sum() / mask.sum())
    scored = replace(BATCH, mask=mask)
    _, gradients = lab.expected_gradients(KIND, scored, lab.policy_objective(scored, weights=weights))
    assert gap(found["gradients"], gradients) < GRADIENT_GAP


@pytest.mark.parametrize("changed", SETUPS)
def test_grpo_update_does_not_depend_on(
    update: Callable[..., dict[str, Any]], expected: dict[str, Any], changed: str
) -> None:
    found = update(SETUPS[changed])
    EXACT.check(found["advantages"], expected["advantages"])
    for name in ("losses", "norms", "clipped"):
        FLOAT32.check(torch.tensor(found[name]), torch.tensor(expected[name]))
    assert gap(found["gradients"], expected["gradients"]) < GRADIENT_GAP
    assert 0.1 < expected["clipped"][1] < 0.9, "the second epoch has ratios inside and outside of the bounds"
