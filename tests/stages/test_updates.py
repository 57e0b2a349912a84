"""The losses of both updates by hand, and what their lineage is made from."""

import hashlib
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from ppoctl.batch.records import State
from ppoctl.ports import Minibatch, OptimizerStep
from ppoctl.ppo.policy_loss import PolicyClip
from ppoctl.stages.actor_update import ActorUpdateStage, PolicyObjective
from ppoctl.stages.critic_update import CriticUpdateStage, ValueObjective
from ppoctl.stages.logprobs import KlPenalty
from ppoctl.stages.updates import MinibatchPlan, Schedule
from stages import hand
from tolerance import FLOAT32

CLIP = PolicyClip(0.2, 0.2, None)
IN_LOSS = KlPenalty(place="loss", estimator="k2", coef=0.1)
BOTH = torch.tensor([0, 1])
STATES = {role: State(role, 4, 9, "parent") for role in ("actor", "critic")}


def plan(*, epochs: int = 1) -> MinibatchPlan:
    rates = Schedule(1.0, "linear", 0, 20, 0.0, OptimizerStep(1.0, 0.0, 1.0, 0.9, 0.95, 1e-8))
    return MinibatchPlan(epochs, 1, 7, rates)


def actor_stage(**changes: Any) -> ActorUpdateStage:
    stage = ActorUpdateStage(
        models=cast(Any, hand.Models()),
        plan=plan(),
        clip=CLIP,
        entropy_coef=0.0,
        penalty=None,
        max_ratio=None,
        fingerprint="keys",
    )
    return replace(stage, **changes)


def critic_stage(**changes: Any) -> CriticUpdateStage:
    stage = CriticUpdateStage(cast(Any, hand.Models()), plan(), clip=None, scale=0.5, fingerprint="keys")
    return replace(stage, **changes)


def objective_of(stage: ActorUpdateStage, **changes: Any) -> PolicyObjective:
    inputs = {"logprobs": hand.logprobs(), "rollouts": hand.rollouts(), "advantages": hand.advantages(kl_coef=0.1)}
    inputs |= changes
    stage.run(STATES["actor"], inputs["rollouts"], inputs["logprobs"], inputs["advantages"])
    return cast(PolicyObjective, cast(hand.Models, stage.models).engine.asked["objective"])


def test_the_policy_loss_is_that_of_its_rows_over_the_global_count() -> None:
    objective = objective_of(actor_stage())
    # Unmoved, the ratio is 1: minus the advantages. Row 1: -(-1 + 0.5 + 3) / 5; row 0: -(1 + 2) / 5.
    FLOAT32.check(objective(torch.tensor([1]), hand.ACTOR[[1]], None, 5), -0.5)
    FLOAT32.check(objective(torch.tensor([0]), hand.ACTOR[[0]], None, 5), -0.6)
    moved = hand.ACTOR[[1]] + torch.tensor([[0.1, 0.0, 0.0]])
    FLOAT32.check(objective(torch.tensor([1]), moved, None, 5), (math.exp(0.1) - 0.5 - 3) / 5)


def test_entropy_is_rewarded_and_distance_from_the_reference_is_punished() -> None:
    stage = actor_stage(entropy_coef=0.3, penalty=IN_LOSS)
    entropy = torch.tensor([[1.0, 2.0, 50.0], [0.0, 1.0, 1.0]])
    # k2 = d^2 / 2 of d = 0.5, -0.5; 0, 0.5, -1: 0.125 * 2 + 0 + 0.125 + 0.5 = 0.875.
    masked = hand.ACTOR.clone()
    masked[0, 2] = 77.0
    expected = -(1 + 2 - 1 + 0.5 + 3) / 5 - 0.3 * 5 / 5 + 0.1 * 0.875 / 5
    FLOAT32.check(objective_of(stage)(BOTH, masked, entropy, 5), expected)


def test_a_bonus_without_entropies_is_no_update_without_a_bonus() -> None:
    assert not objective_of(actor_stage()).needs_entropy
    rewarded = objective_of(actor_stage(entropy_coef=0.3))
    assert rewarded.needs_entropy
    with pytest.raises(AssertionError, match="the entropies were not computed"):
        rewarded(BOTH, hand.ACTOR, None, 5)


def test_a_penalty_in_the_reward_is_not_in_the_loss() -> None:
    in_reward = KlPenalty(place="reward", estimator="k2", coef=0.1)
    assert objective_of(actor_stage(penalty=in_reward)).kl is None
    assert objective_of(actor_stage(penalty=IN_LOSS)).kl is not None


def test_a_penalty_without_a_reference_is_no_update_without_a_penalty() -> None:
    without = hand.logprobs(reference=None)
    with pytest.raises(AssertionError, match="the reference's log-probs were not taken"):
        objective_of(actor_stage(penalty=IN_LOSS), logprobs=without)
    assert objective_of(actor_stage(), logprobs=without).kl is None


def test_rows_without_a_score_train_nothing() -> None:
    advantages, second = hand.advantages(), hand.MASK & torch.tensor([[False], [True]])
    grids = {name: getattr(advantages, name) * second for name in ("advantages", "returns", "token_rewards")}
    only_second = replace(advantages, mask=second, **grids)
    # Entropies 7 in the row without a score, 1 in the other.
    entropy = torch.tensor([[7.0], [1.0]]).expand(2, 3).contiguous()
    loss = objective_of(actor_stage(entropy_coef=0.3), advantages=only_second)(BOTH, hand.ACTOR, entropy, 3)
    FLOAT32.check(loss, -2.5 / 3 - 0.3)


def test_a_rollout_correction_weighs_the_advantages() -> None:
    rollouts = hand.rollouts(sampler_logprobs=(hand.ACTOR - math.log(1.5)) * hand.MASK)
    weighed = objective_of(actor_stage(max_ratio=2.0), rollouts=rollouts)
    FLOAT32.check(weighed.advantages, 1.5 * hand.advantages().advantages)
    assert torch.equal(objective_of(actor_stage(), rollouts=rollouts).advantages, hand.advantages().advantages)


def test_the_value_loss_is_that_of_its_rows_and_scaled() -> None:
    objective = ValueObjective(torch.zeros(2, 3), torch.tensor([[9.0, 9, 0], [1, 2, 3]]), hand.MASK, None, 0.5)
    whole = ValueObjective(objective.old_values, objective.returns, hand.MASK, None, 1.0)
    outputs = torch.tensor([[0.0, 2.0, 1.0]])
    # Squared errors of row 1: 1, 0, 4.
    found, unscaled = (loss(torch.tensor([1]), outputs, None, 5) for loss in (objective, whole))
    FLOAT32.check(found, 0.5 * unscaled)
    at_returns = whole(torch.tensor([1]), torch.tensor([[1.0, 2.0, 3.0]]), None, 5)
    FLOAT32.check(at_returns, 0.0)


@pytest.mark.parametrize("changed", ["rollouts", "logprobs", "advantages", "fingerprint", "parent"])
def test_the_actors_lineage_is_made_from_everything_it_read(changed: str) -> None:
    as_is, other = (lineage_of_the_actor(name) for name in ("", changed))
    assert as_is == lineage_of_the_actor("")
    assert as_is != other


def lineage_of_the_actor(changed: str) -> str:
    state = replace(STATES["actor"], lineage="other") if changed == "parent" else STATES["actor"]
    record = actor_stage(fingerprint="others" if changed == "fingerprint" else "keys").run(
        state,
        hand.rollouts(seeds=torch.tensor([3, 4])) if changed == "rollouts" else hand.rollouts(),
        hand.logprobs(hand.ACTOR * 1.5) if changed == "logprobs" else hand.logprobs(),
        hand.advantages(hand.ACTOR) if changed == "advantages" else hand.advantages(),
    )
    return record.lineage


def test_the_samplers_log_probs_enter_a_lineage_only_where_a_loss_reads_them() -> None:
    def lineages(max_ratio: float | None) -> set[str]:
        found = (hand.rollouts(), hand.rollouts(sampler_logprobs=hand.ACTOR * 1.5))
        inputs = (hand.logprobs(), hand.advantages())
        stage = actor_stage(max_ratio=max_ratio)
        return {stage.run(STATES["actor"], rollouts, *inputs).lineage for rollouts in found}

    assert (len(lineages(None)), len(lineages(2.0))) == (1, 2)


@pytest.mark.parametrize("changed", ["rollouts", "values", "advantages", "fingerprint", "parent"])
def test_the_critics_lineage_is_made_from_everything_it_read(changed: str) -> None:
    assert lineage_of_the_critic("") != lineage_of_the_critic(changed)


def lineage_of_the_critic(changed: str) -> str:
    state = replace(STATES["critic"], lineage="other") if changed == "parent" else STATES["critic"]
    record = critic_stage(fingerprint="others" if changed == "fingerprint" else "keys").run(
        state,
        hand.rollouts(seeds=torch.tensor([3, 4])) if changed == "rollouts" else hand.rollouts(),
        hand.values(hand.ACTOR) if changed == "values" else hand.values(),
        hand.advantages(hand.ACTOR) if changed == "advantages" else hand.advantages(),
    )
    return record.lineage


def test_a_lineage_is_the_same_for_all_time() -> None:
    """A run in progress is resumed by it: not one of these may move to another place."""
    rollouts, logprobs, values, advantages = hand.rollouts(), hand.logprobs(), hand.values(), hand.advantages()
    sampled = hashlib.sha256(rollouts.sampler_logprobs.numpy().tobytes()).hexdigest()
    found = {
        "actor": actor_stage().run(STATES["actor"], rollouts, logprobs, advantages).lineage,
        "corrected": actor_stage(max_ratio=2.0).run(STATES["actor"], rollouts, logprobs, advantages).lineage,
        "critic": critic_stage().run(STATES["critic"], rollouts, values, advantages).lineage,
    }
    reads = {
        "actor": (rollouts.identity, logprobs.identity, advantages.identity),
        "corrected": (rollouts.identity, logprobs.identity, advantages.identity, sampled),
        "critic": (rollouts.identity, values.identity, advantages.identity),
    }
    for name, identities in reads.items():
        text = "\n".join(("update", "parent", "keys", *identities))
        assert found[name] == hashlib.sha256(text.encode()).hexdigest()


def test_an_update_goes_on_from_the_optimizer_steps_before_it() -> None:
    inputs = {"actor": (hand.logprobs(), hand.advantages()), "critic": (hand.values(), hand.advantages())}
    for role, stage in (("actor", actor_stage(plan=plan(epochs=2))), ("critic", critic_stage(plan=plan(epochs=2)))):
        record = stage.run(STATES[role], hand.rollouts(), *inputs[role])
        assert (record.step, record.updates, record.parent) == (5, 9 + 4, "parent")
        # 1 - update / 20, counted on from 9.
        assert record.per_minibatch["lr"] == pytest.approx([0.55, 0.5, 0.45, 0.4])


def test_the_order_of_rows_is_another_in_every_epoch_step_and_role() -> None:
    mask = torch.ones(64, 1, dtype=torch.bool)

    def orders(role: str, step: int) -> list[tuple[int, ...]]:
        found: list[Minibatch] = plan(epochs=2).minibatches(STATES[role], step=step, mask=mask)
        rows = [int(minibatch.rows) for minibatch in found]
        return [tuple(rows[:64]), tuple(rows[64:])]

    all_orders = [order for role in STATES for step in (1, 2) for order in orders(role, step)]
    assert len(set(all_orders)) == len(all_orders) == 8
    assert orders("actor", 1) == all_orders[:2]
