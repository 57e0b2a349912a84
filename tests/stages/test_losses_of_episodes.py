"""Which tokens of an episode are in the losses: from the outputs of the models through advantages to both objectives,
on a hand-made record whose mask has holes."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fakes.components import fake_recipe
from ppoctl.algorithms.advantages_spec import ADVANTAGES
from ppoctl.algorithms.forward_specs import CORRECTION, LOGPROBS, VALUES
from ppoctl.algorithms.stage_spec import StageParts
from ppoctl.algorithms.update_specs import ACTOR_UPDATE, CRITIC_UPDATE
from ppoctl.core.batch.records import Carry, Rewards, State
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import MinibatchResult, OutputRequest, TokenOutputs
from ppoctl.recipe.schema import Recipe
from stages import stub_models

MASK = torch.tensor(
    [[1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 1, 0], [1, 1, 0, 1, 1, 1, 1]]
).bool()
LENGTHS = torch.tensor([7, 5, 6, 7])
HOLES = [(0, 2), (0, 3), (0, 5), (1, 1), (2, 3), (2, 4), (3, 2)]
TURNS = [(0, 0), (0, 6), (1, 2), (2, 5), (3, 3)]
PPO = {"minibatch_seqs": 4, "kl": {"place": "reward", "coef": 0.05}, "epochs": 1}
GRPO = {"minibatch_seqs": 4, "kl": {"place": "loss", "coef": 0.05}, "epochs": 1, "advantages": {"kind": "grpo"}}


def grid(start: float, step: float) -> Tensor:
    """Return different numbers for all positions, also for those that are masked out."""
    return start - step * torch.arange(28.0).reshape(4, 7).sin()


@dataclass
class Outputs:
    """Outputs of the models at every position, and the trainer that receives the objectives."""

    old: Tensor = field(default_factory=lambda: grid(-1.0, 0.3))
    new: Tensor = field(default_factory=lambda: grid(-1.1, 0.4))
    reference: Tensor = field(default_factory=lambda: grid(-1.3, 0.2))
    values_before: Tensor = field(default_factory=lambda: grid(0.4, 0.6))
    values_new: Tensor = field(default_factory=lambda: grid(0.5, 0.5))
    rewards: Tensor = field(default_factory=lambda: grid(0.3, 0.9))
    mask: Tensor = field(default_factory=lambda: MASK)
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    training: str = ""

    def logprobs(self, sequences: Sequences, request: OutputRequest) -> TokenOutputs:
        return TokenOutputs(self.old, torch.ones(4, 7), reference=self.reference if request.reference else None)

    def reference_logprobs(self, sequences: Sequences, request: OutputRequest) -> Tensor:
        return self.reference

    def values(self, sequences: Sequences) -> Tensor:
        return self.values_before

    def update(self, sequences: Sequences, minibatches: Sequence[Any], objective: Any) -> list[MinibatchResult]:
        outputs = TokenOutputs(self.new if self.training == "actor" else self.values_new, torch.ones(4, 7))
        rows = torch.arange(4)
        self.losses.append(float(objective(rows, outputs, objective.totals(rows))))
        return [MinibatchResult(0.0, 1.0, outputs.map(lambda x, m=m: x[m.rows])) for m in minibatches]  # type: ignore[misc]

    actor_at = critic_at = lambda self, state: self

    def stamped(self, state: State) -> State:
        return state

    @contextmanager
    def advancing(self, state: State, *, to: State) -> Any:
        self.training = state.role
        yield self


def losses(recipe: Recipe, outputs: Outputs) -> list[float]:
    """Return the loss of the critic, if there is one, and that of the actor."""
    gate = SimpleNamespace(between=lambda: None)
    parts = StageParts(
        models=cast(Any, outputs),
        generation=cast(Any, SimpleNamespace(gate=gate)),
        scorer=cast(Any, None),
        notify=lambda _: None,
    )
    tokens = torch.full((4, 7), 3, dtype=torch.int32).where(torch.arange(7) < LENGTHS[:, None], 0)
    rollouts = stub_models.rollouts(
        prompt_tokens=torch.tensor([5, 5, 6, 6], dtype=torch.int32),
        prompt_lengths=torch.ones(4, dtype=torch.int64),
        tokens=tokens.to(torch.int32),
        lengths=LENGTHS,
        mask=outputs.mask,
        sampler_logprobs=(outputs.old - 0.1).where(outputs.mask, 0.0),
        finish=torch.tensor([0, 1, 0, 0]),
        seeds=torch.arange(4),
        prompt_ids=["a", "a", "b", "b"],
        sample_indices=[0, 1, 0, 1],
        texts=[""] * 4,
        stamps=["actor@0:first"] * 4,
        sends=[1] * 4,
    )
    present = torch.arange(7) < LENGTHS[:, None]
    scores = outputs.rewards.where(present, 0.0)
    is_grpo = recipe.critic is None
    rewards = Rewards(
        outputs.rewards.where(outputs.mask, 0.0).sum(1), torch.zeros(4, dtype=torch.int64), {}, [""] * 4, [""] * 4,
        token_scores=None if is_grpo else scores,
    )  # fmt: skip
    states = {role: State(role, 0, 0, "first") for role in ("actor", "critic")}

    def run(spec: Any, *inputs: Any) -> Any:
        return spec.build(recipe, parts).run(*inputs)

    values = None if is_grpo else run(VALUES, states["critic"], rollouts)
    logprobs = run(LOGPROBS, states["actor"], rollouts)
    carry = Carry(kl_coef=0.05)
    advantages = run(ADVANTAGES, rollouts, rewards, values, logprobs, carry)
    correction = run(CORRECTION, rollouts, logprobs) if recipe.ppo.corrects_rollouts else None
    outputs.losses.clear()
    updates = [] if values is None else [run(CRITIC_UPDATE, states["critic"], rollouts, values, advantages)]
    updates.append(run(ACTOR_UPDATE, states["actor"], rollouts, logprobs, advantages, correction))
    records = [rollouts, rewards, logprobs, advantages, *updates, *(() if correction is None else (correction,))]
    outputs.metrics = {name: value for record in records for name, value in record.metrics().items()}
    return list(outputs.losses)


READ = {
    "ppo": ("old", "new", "reference", "values_before", "values_new", "rewards"),
    "grpo": ("old", "new", "reference", "rewards"),
}
TABLES: dict[str, dict[str, Any]] = {"ppo": {"ppo": PPO}, "grpo": {"ppo": GRPO, "critic": None}}


@pytest.mark.parametrize("name", TABLES)
def test_only_generated_tokens_change_a_loss(name: str) -> None:
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 7}
    recipe = fake_recipe(rollout=rollout, **TABLES[name])
    before = losses(recipe, Outputs())
    assert len(before) == (2 if name == "ppo" else 1)
    for grid_name in READ[name]:
        for places in (HOLES, *([place] for place in TURNS)):
            changed = Outputs()
            for row, column in places:
                getattr(changed, grid_name)[row, column] += 0.37
            is_equal = losses(recipe, changed) == before
            assert is_equal == (places == HOLES), f"{grid_name} at {places}"


MEANS = {"aggregation": "sequence_mean_token_mean"}
TRUSTED = {"rollout_correction": {"kind": "tis", "max_ratio": 1.05}, "max_sequence_gap": 1.5}
WITHOUT_TURN: dict[str, dict[str, Any]] = {
    "ppo": {
        "ppo": {
            **PPO, **TRUSTED, "minibatch_seqs": 2, "truncated": "bootstrap", "whiten_rewards": True,
            "advantages": {"kind": "gae", "length_adaptive_alpha": 0.5}, "value_loss": {"clip": 0.2, **MEANS},
        },
    },
    "grpo": {"ppo": {**GRPO, **TRUSTED, "minibatch_seqs": 1, "policy_loss": {"kind": "gspo"}}, "critic": None},
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_TURN)
def test_response_without_a_turn_changes_no_loss_and_no_metric(name: str) -> None:
    """Its environment failed when it was opened: no token is in the loss, whatever the models compute."""
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 7}
    recipe = fake_recipe(rollout=rollout, **WITHOUT_TURN[name])
    mask = MASK & (torch.arange(4) != 2)[:, None]
    expected = Outputs(mask=mask)
    before = losses(recipe, expected)
    assert torch.tensor([*before, *expected.metrics.values()]).isfinite().all(), expected.metrics
    assert len(expected.metrics) > 20
    changed = Outputs(mask=mask)
    for grid_name in READ[name]:
        getattr(changed, grid_name)[2] = float("nan")
    assert losses(recipe, changed) == before
    assert changed.metrics == expected.metrics
